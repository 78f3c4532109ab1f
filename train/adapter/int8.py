"""A frozen network in INT8, beside which an adapter learns: QLoRA (https://arxiv.org/abs/2305.14314) with eight bits.

A layer computes what the engine computes when it serves the network: its input is rounded per token, the product is of
integers. So the adapter learns beside the rounding that it will be served beside, of weights and of activations, and
makes up for a part of both. The gradient passes the rounding of the input over (straight through), and reaches it by
the weight that the integers stand for: dx = g · (weight × scale). Nothing of the input is kept for that.

An artifact has its own integers. Of a checkpoint in floating point the layers are rounded to nearest as they are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.schemes import has_int8_embedding, quantized_modules
from penjing.kernels.int8_linear import int8_linear_torch, prepack_int8
from penjing.kernels.quantize import quantize_per_token_torch
from penjing.train.state.initial import Values, Weights, checkpoint_weights

_TOGETHER = 256  # rows whose sums are in memory at once: of a vocabulary of 49,152 they are 100 MB
_LAYER = re.compile(r"model\.layers\.[0-9]+\.(self_attn\.[qkvgo]_proj|conv\.(in|out)_proj|mlp\.(gate|up|down)_proj)")
_EMBEDDING = "model.embed_tokens.weight"
_FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FrozenInt8(nn.Module):
    """A linear layer with INT8 weights that do not learn; (…, in_features) floating → (…, out_features), float32 or
    what autocast computes in.

    Parameters, which get no gradient: `weight` (N, K) int8, `weight_scale` (N, 1) float32, `bias` (N,) float32 or None.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool, zero_points: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.zero_points = in_features, out_features, zero_points
        weight = torch.empty(out_features, in_features, dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        """The product of the rounded input, as `kernels.int8_linear` has it."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        return _Product.apply(input, self.weight, self.weight_scale, self.bias, self.zero_points, dtype)  # pyright: ignore[reportReturnType]

    def extra_repr(self) -> str:
        """See `nn.Module`."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None, zeros: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(weight_NK, scale_N1)
        ctx.kind = x.dtype
        packed = prepack_int8(weight_NK, scale_N1, bias_N, zeros)
        x_MK = x.reshape(-1, packed.in_features)
        y_MN = x_MK.new_empty(len(x_MK), packed.out_features, dtype=dtype)
        for begin in range(0, len(x_MK), _TOGETHER):
            rows = slice(begin, begin + _TOGETHER)
            y_MN[rows] = int8_linear_torch(x_MK[rows], packed)
        return y_MN.view(*x.shape[:-1], packed.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_NK, scale_N1 = ctx.saved_tensors
        # Integers of 8 bits are exact in bfloat16 too, so the scale goes to the gradient.
        scaled = (gradient * scale_N1[:, 0]).to(gradient.dtype)
        return (scaled @ weight_NK.to(gradient.dtype)).to(ctx.kind), None, None, None, None, None


@dataclass(frozen=True)
class Int8Base:
    """What lies in INT8 below an adapter.

    Attributes:
        folder: an artifact, or a checkpoint in floating point.
        is_artifact: which of them.
        layers: name of a linear layer → whether its input has zero points.
        embedding: the type in which the embedding stays.
    """

    folder: Path
    is_artifact: bool
    layers: Mapping[str, bool]
    embedding: torch.dtype

    def apply(self, model: Decoder) -> None:
        """Replace the linear layers of `model` that lie in INT8; its parameters may be without data."""
        for name, zero_points in self.layers.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            made = FrozenInt8(layer.in_features, layer.out_features, layer.bias is not None, zero_points)
            model.set_submodule(name, made)
        table = model.model.embed_tokens
        if self.embedding != table.weight.dtype:
            table.weight = nn.Parameter(torch.empty_like(table.weight, dtype=self.embedding), requires_grad=False)

    def weights(self) -> Weights:
        """The weights of the network that `apply` has changed.

        Raises:
            InputError: from what is returned, see `checkpoint_weights`.
        """
        if self.is_artifact:
            return checkpoint_weights(self.folder, quantized=True)
        stored = checkpoint_weights(self.folder)

        whole = open_checkpoint(self.folder)

        def weights(name: str, shape: tuple[int, ...]) -> Values:
            layer, _, leaf = name.rpartition(".")
            if layer not in self.layers or leaf == "bias":
                return stored(name, shape)
            shape = (shape[0], whole.shape(f"{layer}.weight")[1])
            return _Rounded(stored(f"{layer}.weight", shape), shape[1], leaf == "weight_scale")

        return weights


class _Rounded:
    """A weight (N, K) rounded to nearest with a scale a row: its integers, or its scales (N, 1)."""

    def __init__(self, values: Values, inputs: int, scales: bool) -> None:
        self._values, self._inputs, self._scales = values, inputs, scales

    def __getitem__(self, region: tuple[slice, ...], /) -> Tensor:
        q_NK, scale_N = quantize_per_token_torch(self._values[region[0], slice(0, self._inputs)])
        return scale_N[:, None][:, region[1]] if self._scales else q_NK[:, region[1]]


def read_int8_base(folder: Path, config: DecoderConfig) -> Int8Base:
    """What lies in INT8 when an adapter learns beside the network in `folder`; of a checkpoint in floating point the
    linear layers of attention and MLP.

    Raises:
        ConfigError: it has experts or latent attention, weights of 4 bits, or an embedding in INT8.
        InputError: damaged, or a scheme that penjing does not run.
    """
    if config.moe is not None or config.latent_attention is not None:
        what = "experts" if config.moe is not None else "latent attention"
        raise ConfigError(f"adapter.base = 'int8' is for dense decoders, and {folder} has {what}; leave it out")
    checkpoint = open_checkpoint(folder)
    with torch.device("meta"):
        linears = [name for name, layer in Decoder(config).named_modules() if isinstance(layer, nn.Linear)]
    if checkpoint.quantization is None:
        return Int8Base(folder, False, {name: False for name in linears if _LAYER.fullmatch(name)}, torch.float32)
    schemes = quantized_modules(checkpoint.quantization, linears)
    if any(scheme.bits == 4 for scheme in schemes.values()):
        raise ConfigError(
            f"initial = {folder} has weights of 4 bits, and an adapter learns beside 8; make an INT8 artifact of its "
            "checkpoint, or give the checkpoint, which adapter.base = 'int8' rounds"
        )
    if has_int8_embedding(checkpoint.quantization):
        raise ConfigError(
            f"initial = {folder} has its embedding in INT8, beside which no adapter learns; make the artifact with "
            "embedding_dtype = 'float16'"
        )
    tied = config.tie_word_embeddings
    kind = torch.float32 if tied else _FLOATING.get(checkpoint.dtype(_EMBEDDING), torch.float32)
    return Int8Base(folder, True, {name: scheme.zero_points for name, scheme in schemes.items()}, kind)
