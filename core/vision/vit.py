"""Vision transformers on one device (Dosovitskiy et al., https://arxiv.org/abs/2010.11929), as SigLIP and Idefics3 have
them: no class token, pre-norm layers, a norm after the last.

Parameter names are those of Hugging Face's `Idefics3VisionTransformer`. Shapes: N images, P patches, E hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.vision.paired_config import Activation

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
}


class LayerSizes(Protocol):
    """What a `ViTLayer` must know."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def layer_norm_eps(self) -> float: ...


class ViTConfig(Config):
    """Everything that fixes the computation of a `VisionTransformer`."""

    image_size: int = Field(gt=0, le=1 << 14, description="Rows and columns of an image in pixels.")
    patch_size: int = Field(gt=0, description="Rows and columns of a patch in pixels.")
    num_channels: int = Field(default=3, gt=0, description="Channels of an image.")
    hidden_size: int = Field(gt=0, description="Size of a patch's hidden state.")
    intermediate_size: int = Field(gt=0, description="Inner width of the MLP.")
    num_hidden_layers: int = Field(gt=0, le=1024, description="Layers.")
    num_attention_heads: int = Field(gt=0, description="Heads.")
    layer_norm_eps: float = Field(default=1e-6, gt=0, description="Added to the variance before its root.")

    @model_validator(mode="after")
    def _parts_divide(self) -> ViTConfig:
        for whole, part in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole}={getattr(self, whole)} is not divisible by {part}={getattr(self, part)}")
        return self

    @property
    def side(self) -> int:
        """Patches of a row of an image."""
        return self.image_size // self.patch_size


class _Embeddings(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, size, patch, patch)
        self.position_embedding = nn.Embedding(config.side**2, size)

    def forward(self, images: Tensor) -> Tensor:
        return self.patch_embedding(images).flatten(2).transpose(1, 2) + self.position_embedding.weight


class _Attention(nn.Module):
    def __init__(self, config: LayerSizes, causal: bool):
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.causal = config.num_attention_heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x_NPE: Tensor) -> Tensor:
        q, k, v = (
            layer(x_NPE).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class TwoLinears(nn.Module):
    """The MLP of a layer."""

    def __init__(self, config: LayerSizes, activation: Activation):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self._activation(self.fc1(x)))


class ViTLayer(nn.Module):
    """Attention among all patches and an MLP, each behind a norm and added to the residual.

    Args:
        causal: what is seen comes before, as in CLIP's texts.
    """

    def __init__(self, config: LayerSizes, activation: Activation = "gelu_pytorch_tanh", causal: bool = False):
        super().__init__()
        self.self_attn, self.mlp = _Attention(config, causal), TwoLinears(config, activation)
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(config.hidden_size, config.layer_norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class _Layers(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        self.layers = nn.ModuleList(ViTLayer(config) for _ in range(config.num_hidden_layers))


class VisionTransformer(nn.Module):
    """Images (N, channels, size, size) → hidden states of their patches (N, P, E), row by row."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.encoder = _Layers(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embeddings(images)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


@torch.no_grad()
def initialize_vit(model: VisionTransformer) -> None:
    """Normal weights of deviation 1 / √inputs, positions of 0.02; norms are one, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, module.weight[0].numel() ** -0.5)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    nn.init.normal_(model.embeddings.position_embedding.weight, 0.0, 0.02)
