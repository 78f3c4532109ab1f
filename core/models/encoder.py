"""BERT-style text encoders on one device (Devlin et al., https://arxiv.org/abs/1810.04805): tokens → one vector a text.

Post-norm layers, learned positions, exact GELU; the hidden states of a text are averaged and scaled to length 1, as
sentence-transformers does (Reimers and Gurevych, https://arxiv.org/abs/1908.10084).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.models.encoder_config import EncoderConfig


class EncoderLayer(nn.Module):
    """Self-attention over the tokens that the mask keeps, then an MLP; each added to its input and normalised."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_attention_heads
        self.query, self.key, self.value, self.output = (nn.Linear(size, size) for _ in range(4))
        self.attention_norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(self, x_TBE: Tensor, bias_B11T: Tensor) -> Tensor:
        """`bias_B11T` is added to the scores: 0 where a token is, a very negative number where padding is."""
        q, k, v = (self._heads(layer(x_TBE)) for layer in (self.query, self.key, self.value))
        mixed_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_B11T)
        x = self.attention_norm(x_TBE + self.output(mixed_BHTD.permute(2, 0, 1, 3).flatten(2)))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def _heads(self, x_TBE: Tensor) -> Tensor:
        return x_TBE.unflatten(2, (self.num_heads, -1)).permute(1, 2, 0, 3)


class Encoder(nn.Module):
    """Token ids and mask (batch, seq) → embeddings (batch, hidden), of length 1."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, size)
        self.positions = nn.Embedding(config.max_position_embeddings, size)
        self.types = nn.Embedding(config.type_vocab_size, size)
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """
        Args:
            tokens_BT: int64; at most `max_position_embeddings` of a text.
            mask_BT: 1 where a token is, 0 where padding is; any dtype.
        """
        x = self.words(tokens_BT.T) + self.positions.weight[: tokens_BT.shape[1], None] + self.types.weight[0]
        x = self.norm(x)
        mask_BT = mask_BT.to(x.dtype)
        bias_B11T = (1 - mask_BT)[:, None, None, :] * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias_B11T)
        total = (x * mask_BT.T[..., None]).sum(0)
        return F.normalize(total / mask_BT.sum(1, keepdim=True).clamp(min=1e-9), dim=1)


def published_name(name: str) -> str:
    """The name that BERT checkpoints give to the parameter `name` of an `Encoder`."""
    for ours, theirs in _EMBEDDINGS.items():
        if name.startswith(f"{ours}."):
            return f"embeddings.{theirs}{name.removeprefix(ours)}"
    _, layer, part, kind = name.split(".")
    return f"encoder.layer.{layer}.{_LAYER[part]}.{kind}"


_EMBEDDINGS = {
    "words": "word_embeddings",
    "positions": "position_embeddings",
    "types": "token_type_embeddings",
    "norm": "LayerNorm",
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
