"""Vision transformers on one device (Dosovitskiy et al., https://arxiv.org/abs/2010.11929) with pre-norm layers: as
SigLIP and Idefics3 have them, with a norm after the last, or as CLIP has them, with a class token.

Parameter names are those of Hugging Face's `Idefics3VisionTransformer` and `CLIPVisionModel`. Shapes: N images,
P patches, E hidden.
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

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
}
"""What may stand between two linear layers. Its smallest value is -0.17."""


class LayerSizes(Protocol):
    """What a `ViTLayer` must know."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def attention_size(self) -> int: ...
    @property
    def layer_norm_eps(self) -> float: ...


class ViTConfig(Config):
    """Everything that fixes the computation of a `VisionTransformer`."""

    image_size: int = Field(gt=0, le=1 << 14, description="Rows and columns of an image in pixels.")
    patch_size: int = Field(gt=0, description="Rows and columns of a patch in pixels.")
    num_channels: int = Field(default=3, gt=0, description="Channels of an image.")
    hidden_size: int = Field(gt=0, description="Size of a patch's hidden state.")
    intermediate_size: int = Field(gt=0, description="Inner width of the MLP.")
    num_hidden_layers: int = Field(gt=0, le=1024, description="How many layers it has.")
    num_attention_heads: int = Field(gt=0, description="Heads.")
    head_dim: int | None = Field(
        default=None, gt=0, description="Numbers of a head; none given: hidden_size / num_attention_heads."
    )
    intermediate_sizes: tuple[int, ...] | None = Field(
        default=None, description="Inner width of the MLP of each layer, where they differ."
    )
    layer_norm_eps: float = Field(default=1e-6, gt=0, description="Added to the variance before its root.")
    activation: Activation = Field(default="gelu_pytorch_tanh", description="Between the two layers of the MLP.")
    class_token: bool = Field(
        default=False,
        description="A token beside the patches, which have no bias then, and a norm before the first layer, as CLIP "
        "has them; what becomes of the token is left out.",
    )
    last_norm: bool = Field(default=True, description="A norm after the last layer.")

    @model_validator(mode="after")
    def _parts_divide(self) -> ViTConfig:
        for whole, part in (("image_size", "patch_size"), ("hidden_size", "num_attention_heads")):
            given = self.head_dim is not None and whole == "hidden_size"
            if not given and getattr(self, whole) % getattr(self, part):
                raise ValueError(f"{whole}={getattr(self, whole)} is not divisible by {part}={getattr(self, part)}")
        widths = self.intermediate_sizes
        if widths is not None and (len(widths) != self.num_hidden_layers or min(widths, default=0) < 1):
            raise ValueError(f"intermediate_sizes={widths} needs a width of 1 or more for each layer")
        return self

    @property
    def attention_size(self) -> int:
        """Numbers of all heads of a patch."""
        return self.num_attention_heads * (self.head_dim or self.hidden_size // self.num_attention_heads)

    def layer(self, index: int) -> ViTConfig:
        """That of a transformer all of whose layers are as this one."""
        if self.intermediate_sizes is None:
            return self
        own = {"intermediate_size": self.intermediate_sizes[index], "intermediate_sizes": None}
        return self.model_copy(update=own)

    @property
    def side(self) -> int:
        """Patches of a row of an image."""
        return self.image_size // self.patch_size


class Patches(nn.Module):
    """Images (N, C, H, W) → their patches with positions (N, P, E), behind a class token where there is one.

    Args:
        patches: of an image.
    """

    def __init__(self, channels: int, size: int, patch: int, patches: int, class_token: bool):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(size)) if class_token else None
        self.patch_embedding = nn.Conv2d(channels, size, patch, patch, bias=not class_token)
        self.position_embedding = nn.Embedding(patches + class_token, size)

    def forward(self, images: Tensor) -> Tensor:
        x_NPE = self.patch_embedding(images).flatten(2).transpose(1, 2)
        if self.class_embedding is not None:
            x_NPE = torch.cat([self.class_embedding.expand(x_NPE.shape[0], 1, -1), x_NPE], 1)
        return x_NPE + self.position_embedding.weight


class _Attention(nn.Module):
    def __init__(self, config: LayerSizes, causal: bool):
        super().__init__()
        size, inner = config.hidden_size, config.attention_size
        self.head_dim, self.causal = inner // config.num_attention_heads, causal
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, inner) for _ in range(3))
        self.out_proj = nn.Linear(inner, size)

    def forward(self, x_NPE: Tensor) -> Tensor:
        q, k, v = (
            layer(x_NPE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
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
        self._activation = ACTIVATIONS[activation]

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
        self.layers = nn.ModuleList(
            ViTLayer(config.layer(index), config.activation) for index in range(config.num_hidden_layers)
        )


class VisionTransformer(nn.Module):
    """Images (N, channels, size, size) → hidden states of their patches (N, P, E), row by row."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        size, has_class = config.hidden_size, config.class_token
        self.embeddings = Patches(config.num_channels, size, config.patch_size, config.side**2, has_class)
        self.pre_layrnorm = nn.LayerNorm(size, config.layer_norm_eps) if has_class else nn.Identity()
        self.encoder = _Layers(config)
        self.post_layernorm = nn.LayerNorm(size, config.layer_norm_eps) if config.last_norm else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        x = self.embedded(images)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.finished(x)

    def embedded(self, images: Tensor) -> Tensor:
        """What the first layer reads."""
        return self.pre_layrnorm(self.embeddings(images))

    def finished(self, x: Tensor) -> Tensor:
        """The hidden states of the patches, of what the last layer gives."""
        return self.post_layernorm(x[:, 1:] if self.config.class_token else x)


@torch.no_grad()
def initialize_vit(model: nn.Module) -> None:
    """A transformer of images: normal weights of deviation 1 / √inputs, positions of 0.02; norms are one, biases
    zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, 0.0, module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Patches):
            nn.init.normal_(module.position_embedding.weight, 0.0, 0.02)
            if module.class_embedding is not None:
                nn.init.normal_(module.class_embedding, 0.0, 0.02)
