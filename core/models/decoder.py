"""The decoder of the Llama family on one device: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3.

Parameter names are those of Hugging Face checkpoints. Shapes: B sequences, T tokens, E hidden, H heads, KV key-value
heads, D head_dim, V vocabulary. Leading dimensions are free: (B, T) for a batch, (T,) for the flat tokens of many
sequences, whose keys and values an `Attend` keeps elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import inverse_frequencies
from penjing.kernels.rms_norm import rms_norm
from penjing.kernels.rotary import apply_rotary, rotary_cos_sin
from penjing.kernels.swiglu import swiglu

# (layer, q (…, T, H, D), k (…, T, KV, D), v (…, T, KV, D)) → (…, T, H, D); q and k are rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """`kernels.rms_norm` with its weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections, optional head norms (Qwen3) and rotation around an `Attend`."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.layer = layer
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class MLP(nn.Module):
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and the last norm: token ids (…, T) → hidden states (…, T, E)."""

    inverse_frequency: Tensor

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("inverse_frequency", inverse_frequencies(config), persistent=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        # The embedding may be stored in half precision; activations follow the norms.
        x = self.embed_tokens(token_ids).to(self.norm.weight.dtype)
        cos, sin = rotary_cos_sin(self.inverse_frequency, positions)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model. `load_state_dict` takes a Hugging Face checkpoint's tensors as they are."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token.

        Args:
            token_ids: (…, T) int64.
            positions: (…, T) int64, absolute; 0 … T − 1 when None.
            attend: attention over whatever cache the caller keeps; causal (windowed) attention among the T tokens of
                each leading index when None.
            logit_rows: (R,) int64 rows of the flattened (…, T) tokens whose logits are wanted; all when None.

        Returns:
            (…, T, V), or (R, V) with `logit_rows`; dtype of the parameters.

        Raises:
            ValueError: no tokens, or shapes that do not fit.
        """
        if token_ids.dim() == 0 or token_ids.numel() == 0:
            raise ValueError(f"token_ids has shape {tuple(token_ids.shape)}; at least one token is needed")
        if positions is None:
            positions = torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape)
        elif positions.shape != token_ids.shape:
            raise ValueError(f"positions has shape {tuple(positions.shape)}, token_ids {tuple(token_ids.shape)}")
        hidden = self.model(token_ids, positions, attend or self.causal_attention)
        if logit_rows is not None:
            hidden = hidden.flatten(0, -2)[logit_rows]
        return self.lm_head(hidden)

    def causal_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The `Attend` without a cache: each token sees itself and the tokens before it, within the layer's window."""
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        window = self.config.layer_window(layer)
        num_tokens = q.shape[-2]
        mask = None
        if window is not None and window < num_tokens:
            mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=q.device).tril()
            mask &= ~mask.tril(-window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(-3, -2)
