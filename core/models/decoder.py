"""The decoder on one device: Llama 2/3, SmolLM2, Mistral, Qwen2/2.5, Qwen3; Mixtral, Qwen2/3-MoE, dots.llm1,
DeepSeek-V2/V3; and what `core.folded` makes of Gemma 3, Granite, SmolLM3, OLMo 2, Phi-3, Cohere, LFM2 and others.

Parameter names are those of Hugging Face checkpoints, up to `tensor_names.stored_name`. Shapes: B sequences, T tokens,
E hidden, H heads, KV key-value heads, D head_dim, V vocabulary. Leading dimensions are free: (B, T) for a batch, (T,)
for the flat tokens of many sequences, whose keys and values an `Attend` keeps elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.layers.short_conv import ShortConv
from penjing.core.models.attention import (
    Attend,
    Attention,
    causal_attention,
    document_positions,
    positions_and_attention,
)
from penjing.core.models.config import DecoderConfig
from penjing.core.models.latent_attention import LatentAttention
from penjing.core.models.mlp import MLP, TokenInput
from penjing.core.models.moe import MoE
from penjing.core.models.norm import RMSNorm
from penjing.core.models.rope import inverse_frequencies, layer_angles
from penjing.kernels.cross_entropy import linear_cross_entropy
from penjing.kernels.hadamard import hadamard
from penjing.kernels.scored_attention import soft_cap


class DecoderLayer(nn.Module):
    """Attention or a short convolution, and MLP or experts, each behind a norm, before one or between two, and added to
    the residual; with `parallel` both read the residual as it enters the layer. What leaves it may be scaled."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.is_conv = config.is_conv(layer)
        if self.is_conv:
            self.conv = ShortConv(config.hidden_size, config.conv_taps, config.conv_bias, layer)
        else:
            latent = config.latent_attention is not None
            self.self_attn = LatentAttention(config, layer) if latent else Attention(config, layer)
        if config.moe is not None and config.is_moe(layer):
            self.mlp = MoE(config.hidden_size, config.moe, config.rms_norm_eps)
        else:
            hidden, inner, eps = config.hidden_size, config.ffn_size(layer), config.rms_norm_eps
            how = config.mlp_bias, config.mlp_hadamard, config.activation, config.mlp_gated
            self.mlp = MLP(hidden, inner, *how, RMSNorm(inner, eps) if config.inner_norms else None)

        def norm(there: bool) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config.rms_norm_eps) if there else None

        before, after = config.norms != "after", config.norms != "before"
        self.input_layernorm, self.post_attention_layernorm = norm(before), norm(before)
        self.attention_output_norm, self.mlp_output_norm = norm(after), norm(after)
        width = config.token_inputs
        self.token = TokenInput(config.hidden_size, width, config.rms_norm_eps) if width else None
        self.layer_scale = nn.Parameter(torch.ones(1)) if config.layer_scales else None
        self.parallel = config.parallel

    @property
    def mixer(self) -> LatentAttention | Attention | ShortConv:
        """What mixes tokens; it knows the layer's number."""
        return self.conv if self.is_conv else self.self_attn

    @property
    def dtype(self) -> torch.dtype:
        """Of the norms, which activations follow."""
        norm = self.input_layernorm if self.mlp_output_norm is None else self.mlp_output_norm
        assert norm is not None
        return norm.weight.dtype

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, token: Tensor | None = None) -> Tensor:
        """`token`, (…, T, token_inputs): what the layer takes of each token besides."""
        if self.parallel:
            return self.with_mlp(x) + self._attended(x, cos, sin, attend)
        return self.with_mlp(self.with_attention(x, cos, sin, attend), token)

    def with_attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The first half: attention, or what stands in its place, with its norms, added to `x`."""
        return x + self._attended(x, cos, sin, attend)

    def with_mlp(self, x: Tensor, token: Tensor | None = None) -> Tensor:
        """The second half: the MLP likewise, what the layer takes of a token, and its scale."""
        read = x if self.post_attention_layernorm is None else self.post_attention_layernorm(x)
        made = self.mlp(read)
        left = x + (made if self.mlp_output_norm is None else self.mlp_output_norm(made))
        if self.token is not None:
            assert token is not None, "the layer takes something of each token"
            left = left + self.token(left, token)
        return left if self.layer_scale is None else left * self.layer_scale.to(left.dtype)

    def _attended(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        read = x if self.input_layernorm is None else self.input_layernorm(x)
        made = self.conv(read, attend.before) if self.is_conv else self.self_attn(read, cos, sin, attend)
        return made if self.attention_output_norm is None else self.attention_output_norm(made)


class Backbone(nn.Module):
    """Embedding, layers and the last norm: token ids (…, T) → hidden states (…, T, E)."""

    inverse_frequency: Tensor

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.learned_positions:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.token_inputs:
            self.embed_inputs = nn.Embedding(config.vocab_size * config.num_hidden_layers, config.token_inputs)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("inverse_frequency", inverse_frequencies(config), persistent=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """(…, E) what the first layer reads of tokens (…) int64."""
        return table_basis(self.embed_tokens(token_ids), self.config)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, embedded: Tensor | None = None) -> Tensor:
        # The embedding may be stored in half precision; activations follow the norms.
        x = (self.embed(token_ids) if embedded is None else embedded).to(self.norm.weight.dtype)
        if self.config.learned_positions:
            x = x + self.embed_positions(positions).to(x.dtype)
        angles = layer_angles(self.config, self.inverse_frequency, positions)
        layers = self.config.num_hidden_layers
        for index, layer in enumerate(self.layers):
            token = (self.embed_inputs(token_ids * layers + index),) if self.config.token_inputs else ()
            x = layer(x, *angles(index), attend, *token)
        return self.norm(x)


class Decoder(nn.Module):
    """A causal language model. `load_state_dict` takes a Hugging Face checkpoint's tensors as they are."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the parameters that the configuration shares: call it after parameters were replaced."""
        if self.config.tie_word_embeddings and isinstance(self.lm_head, nn.Linear):  # integers share no parameter
            self.lm_head.weight = self.model.embed_tokens.weight
        first, *others = self.model.layers[: self.config.shared_layers]
        for layer in others:
            for name, parameter in first.named_parameters():
                owner, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(owner), leaf, parameter)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor | None = None,
        attend: Attend | None = None,
        logit_rows: Tensor | None = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        label_smoothing: float = 0.0,
        embedded: Tensor | None = None,
        paths: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, or with `targets` their summed loss, for which logits never exist all at once.

        Args:
            token_ids: (…, T) int64.
            positions: (…, T) int64, absolute; 0 … T − 1 when None.
            attend: attention over whatever cache the caller keeps; causal (windowed) attention among the T tokens of
                each leading index when None.
            logit_rows: (R,) int64 rows of the flattened (…, T) tokens whose logits are wanted; all when None.
            documents: (…, T) int64, equal where neighbours are of one document: without `attend`, nothing sees beyond
                its document; without `positions`, they count from each document's beginning.
            targets: (…, T) or, with `logit_rows`, (R,) int64 next tokens, −100 for none.
            label_smoothing: of the loss.
            embedded: (…, T, E) what enters the first layer in place of the tokens' embeddings.
            paths: (N, W) int64, which of the tokens N sequences are made of that share their beginnings, in place of
                `positions`, `attend` and `documents`; see `positions_and_attention`.

        Returns:
            (…, T, V), or (R, V) with `logit_rows`; dtype of the parameters. With `targets` a float32 scalar.

        Raises:
            ValueError: no tokens, or shapes that do not fit.
        """
        if token_ids.dim() == 0 or token_ids.numel() == 0:
            raise ValueError(f"token_ids has shape {tuple(token_ids.shape)}; at least one token is needed")
        if documents is not None and documents.shape != token_ids.shape:
            raise ValueError(f"documents has shape {tuple(documents.shape)}, token_ids {tuple(token_ids.shape)}")
        if paths is not None:
            positions, attend = positions_and_attention(self.config, token_ids, paths)
        elif positions is None and documents is not None:
            positions = document_positions(documents)
        elif positions is None:
            positions = torch.arange(token_ids.shape[-1], device=token_ids.device).expand(token_ids.shape)
        elif positions.shape != token_ids.shape:
            raise ValueError(f"positions has shape {tuple(positions.shape)}, token_ids {tuple(token_ids.shape)}")
        attend = attend or causal_attention(self.config, documents)
        # Whoever gives another backbone, as pipelines do, need not know of images.
        seen = () if embedded is None else (embedded,)
        hidden = self.model(token_ids, positions, attend, *seen)
        if logit_rows is not None:
            hidden = hidden.flatten(0, -2)[logit_rows]
        if targets is not None and (self.config.head_bias or self.config.logit_cap is not None):
            logits = self.logits(hidden).flatten(0, -2).float()
            return F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=label_smoothing)
        if targets is not None:
            rows, weight = table_basis(hidden, self.config).to(hidden.dtype).flatten(0, -2), self.lm_head.weight
            return linear_cross_entropy(rows, weight, targets.flatten(), label_smoothing=label_smoothing)
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, E) what the last norm gives → (…, V)."""
        return capped_logits(self.lm_head(table_basis(hidden, self.config).to(hidden.dtype)), self.config)


def table_basis(x: Tensor, config: DecoderConfig) -> Tensor:
    """(…, E) between the basis of the layers and that of the embedding's and the head's rows, in either direction;
    float32 where they differ."""
    return hadamard(x, config.table_hadamard) if config.table_hadamard else x


def capped_logits(logits: Tensor, config: DecoderConfig) -> Tensor:
    """What the head gives, within the network's `logit_cap` if it has one; (…, V)."""
    return logits if config.logit_cap is None else soft_cap(logits, config.logit_cap)
