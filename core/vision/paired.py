"""The towers of CLIP (Radford et al., https://arxiv.org/abs/2103.00020) and SigLIP (Zhai et al.,
https://arxiv.org/abs/2303.15343): a transformer of images and one of texts, on one device.

Parameter names are those of Hugging Face's `CLIPModel` and `SiglipModel` inside their towers. Shapes: N images or
texts, P patches, T tokens, E hidden, D numbers of a vector.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.vision.paired_config import ImageTransformerConfig, TextTransformerConfig, TransformerConfig
from penjing.core.vision.vit import Patches, TwoLinears, ViTLayer


class ImageTransformer(nn.Module):
    """Normalised images (N, channels, size, size) → (N, D), of any length."""

    def __init__(self, config: ImageTransformerConfig):
        super().__init__()
        self.config = config
        size, has_class = config.hidden_size, config.pooling == "class"
        self.embeddings = Patches(config.num_channels, size, config.patch_size, config.patches, has_class)
        self.pre_layrnorm = nn.LayerNorm(size, config.layer_norm_eps) if has_class else nn.Identity()
        self.encoder = _Layers(config, causal=False)
        self.post_layernorm = nn.LayerNorm(size, config.layer_norm_eps)
        self.head = None if has_class else _Question(config)
        self.projection = nn.Linear(size, config.dimension, bias=False) if has_class else None

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        x_NPE = self.encoder(self.pre_layrnorm(self.embeddings(images)))
        if self.head is not None:
            return self.head(self.post_layernorm(x_NPE))
        assert self.projection is not None, "what has no head has a projection"
        return self.projection(self.post_layernorm(x_NPE[:, 0]))


class TextTransformer(nn.Module):
    """Token ids and mask (N, T) → (N, E), the hidden state that stands for each text."""

    def __init__(self, config: TextTransformerConfig):
        super().__init__()
        self.config = config
        self.embeddings = _Tokens(config)
        self.encoder = _Layers(config, causal=config.pooling == "end")
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
        """
        Args:
            tokens_NT: int64; at most `max_position_embeddings` of a text.
            mask_NT: 1 where a token is, 0 where padding is, which comes behind; any dtype.
        """
        config = self.config
        if config.pooling == "last":
            filled = torch.where(mask_NT != 0, tokens_NT, config.pad_token_id)
            tokens_NT = F.pad(
                filled, (0, config.max_position_embeddings - tokens_NT.shape[1]), value=config.pad_token_id
            )
            return self.final_layer_norm(self.encoder(self.embeddings(tokens_NT))[:, -1])
        # What stands behind the end is not seen by it, so that padding needs no mask.
        known_NT = tokens_NT if config.end_token_id is None else (tokens_NT == config.end_token_id).to(torch.int32)
        ends_N = torch.where(mask_NT != 0, known_NT, -1).argmax(-1)
        x_NTE = self.final_layer_norm(self.encoder(self.embeddings(tokens_NT)))
        return x_NTE[torch.arange(x_NTE.shape[0], device=x_NTE.device), ends_N]


class _Tokens(nn.Module):
    def __init__(self, config: TextTransformerConfig):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        return self.token_embedding(tokens_NT) + self.position_embedding.weight[: tokens_NT.shape[1]]


class _Layers(nn.Module):
    def __init__(self, config: TransformerConfig, *, causal: bool):
        super().__init__()
        self.layers = nn.ModuleList(
            ViTLayer(config, config.activation, causal) for _ in range(config.num_hidden_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Question(nn.Module):
    """A learnt question that looks at all patches, and an MLP behind its answer."""

    def __init__(self, config: ImageTransformerConfig):
        super().__init__()
        size = config.hidden_size
        self.probe = nn.Parameter(torch.zeros(1, 1, size))
        self.attention = _Attended(size)
        self.num_heads = config.num_attention_heads
        self.layernorm = nn.LayerNorm(size, config.layer_norm_eps)
        self.mlp = TwoLinears(config, config.activation)

    def forward(self, x_NPE: Tensor) -> Tensor:
        weights, biases = self.attention.in_proj_weight.chunk(3), self.attention.in_proj_bias.chunk(3)
        sources = (self.probe, x_NPE, x_NPE)  # one question for all images
        q, k, v = (
            F.linear(source, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for source, weight, bias in zip(sources, weights, biases, strict=True)
        )
        mixed = F.scaled_dot_product_attention(q.expand(x_NPE.shape[0], -1, -1, -1), k, v)
        answer = self.attention.out_proj(mixed.transpose(1, 2).flatten(2))
        return (answer + self.mlp(self.layernorm(answer)))[:, 0]


class _Attended(nn.Module):
    """The weights of `nn.MultiheadAttention`, under its names."""

    def __init__(self, size: int):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)
