"""Quantized linear layers in a decoder.

An artifact stores, for each quantized linear layer X, `X.weight_scale` and

    8 bits  X.weight (int8, (out, in)); the scale is floating (out, 1)
    4 bits  X.weight_packed (int32, (out, in / 8)) and X.weight_shape (out, in); the scale is floating (out, in / group)

as compressed-tensors' int-quantized and pack-quantized formats have them. Weights of 4 bits with offsets have
`X.weight_offset` too, as the scale, and both are float16 in what penjing writes. Activations are quantized while it
runs, per token or, beside offsets, per token and group (W8A8, `kernels.int8_linear`, and W4A8, `kernels.int4_linear`).
Beside 4-bit weights they may become bfloat16 instead (W4A16).

Weights of 4 bits in steps (`kernels.stepped`) have X.weight_packed and X.weight_shape, a scale (out, 1) as those of 8
bits have, and X.weight_step and X.weight_offset, int8 (out, in / group). They are INT8 layers in all else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from penjing.core.errors import InputError
from penjing.core.runtime.schemes import Scheme
from penjing.kernels.int4_linear import (
    OFFSET,
    ActivationBits,
    PackedInt4,
    int4_linear,
    prepack_int4,
    unpack_int4,
)
from penjing.kernels.int8_linear import PackedInt8, int8_linear, prepack_int8
from penjing.kernels.stepped import SteppedInt8, stepped_int8

Packed = TypeVar("Packed")


def moved(packed: Packed, fn: Callable[[Tensor], Tensor]) -> Packed:
    """`packed`, a dataclass of tensors, where `fn` moves them; types stay, and weights in steps are expanded."""
    found = {}
    for field in fields(packed):  # type: ignore[arg-type]
        value = getattr(packed, field.name)
        if isinstance(value, SteppedInt8) and fn(value.packed_NK8).device != value.device:
            value = value.expand()  # devices multiply bytes
        if isinstance(value, Tensor):
            found[field.name] = value.to(fn(value).device)
    still = all(getattr(packed, name) is value for name, value in found.items())
    return packed if still else replace(packed, **found)  # type: ignore[type-var]


class Int8Linear(nn.Module):
    """A linear layer with INT8 weights; (…, in_features) floating → (…, out_features) float32.

    It has no parameters; `packed` goes where the module is moved.
    """

    def __init__(
        self,
        weight_NK: Tensor | SteppedInt8,
        scale_N: Tensor,
        bias_N: Tensor | None = None,
        zero_points: bool = False,
    ) -> None:
        super().__init__()
        self.packed: PackedInt8 = prepack_int8(weight_NK, scale_N, bias_N, zero_points)
        self.in_features, self.out_features = self.packed.in_features, self.packed.out_features

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)
        self.packed = moved(self.packed, fn)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y_MN = int8_linear(x.reshape(-1, self.in_features), self.packed)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Int4Linear(nn.Module):
    """A linear layer with 4-bit weights in groups; (…, in_features) floating → (…, out_features) float32.

    It has no parameters; `packed` goes where the module is moved.
    """

    def __init__(
        self,
        packed_NK8: Tensor,
        scale_NG: Tensor,
        bias_N: Tensor | None = None,
        offset_NG: Tensor | None = None,
        activation_bits: ActivationBits = 8,
    ):
        super().__init__()
        self.packed: PackedInt4 = prepack_int4(packed_NK8, scale_NG, bias_N, offset_NG, activation_bits)
        self.in_features, self.out_features = self.packed.in_features, self.packed.out_features

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int4Linear:
        super()._apply(fn, recurse)
        self.packed = moved(self.packed, fn)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y_MN = int4_linear(x.reshape(-1, self.in_features), self.packed)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.packed.group}"


QUANTIZED = (Int8Linear, Int4Linear)


def apply_quantized(model: nn.Module, schemes: Mapping[str, Scheme], tensor: Callable[[str], Tensor]) -> None:
    """Replace the linear layers `schemes` of `model` by quantized ones, one at a time.

    Args:
        model: changed in place; may lie on the meta device.
        schemes: module name, such as "model.layers.0.mlp.up_proj", → how it is stored.
        tensor: tensor name → tensor; called for the tensors at the head of this file and, where the layer has one,
            X.bias.

    Raises:
        InputError: a tensor has another shape or dtype than its layer needs.
    """
    for name, scheme in schemes.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise InputError(f"{name} is a {type(layer).__name__}; only linear layers are quantized")
        bias_N = tensor(f"{name}.bias") if layer.bias is not None else None
        try:
            made = quantized_linear(name, scheme, tensor, bias_N)
        except ValueError as error:
            raise InputError(f"{name}: {error}") from None
        shape = (made.out_features, made.in_features)
        if shape != (layer.out_features, layer.in_features):
            raise InputError(
                f"{name}.weight has shape {shape}; config.json asks for ({layer.out_features}, {layer.in_features})"
            )
        model.set_submodule(name, made)


def quantized_linear(
    name: str, scheme: Scheme, tensor: Callable[[str], Tensor], bias_N: Tensor | None = None
) -> Int8Linear | Int4Linear:
    """The layer `name` of the tensors that `tensor` finds.

    Raises:
        InputError: groups of another size than `scheme` says, or a stored shape that the weight has not.
        ValueError: a tensor of a wrong shape or dtype.
    """
    scale = tensor(f"{name}.weight_scale")
    if scheme.bits == 8:
        return Int8Linear(tensor(f"{name}.weight"), scale, bias_N, scheme.zero_points)
    if scheme.steps:
        return _checked(name, scheme, tensor, Int8Linear(_stepped(name, tensor), scale, bias_N, scheme.zero_points))
    offset = tensor(f"{name}.weight_offset") if scheme.offsets else None
    layer = Int4Linear(tensor(f"{name}.weight_packed"), scale, bias_N, offset, scheme.activation_bits)
    return _checked(name, scheme, tensor, layer)


L = TypeVar("L", Int8Linear, Int4Linear)


def _checked(name: str, scheme: Scheme, tensor: Callable[[str], Tensor], layer: L) -> L:
    if layer.packed.group != scheme.group:
        raise InputError(
            f"{name} has scales for groups of {layer.packed.group} inputs, config.json says {scheme.group}"
        )
    stored, shape = tensor(f"{name}.weight_shape").tolist(), [layer.out_features, layer.in_features]
    if stored != shape:
        raise InputError(f"{name}.weight_shape says {stored}, its packed weight has {shape}")
    return layer


def _stepped(name: str, tensor: Callable[[str], Tensor]) -> SteppedInt8:
    names = ("weight_packed", "weight_step", "weight_offset")
    return stepped_int8(*(tensor(f"{name}.{part}") for part in names))


def dequantized(name: str, scheme: Scheme, tensor: Callable[[str], Tensor]) -> Tensor:
    """(N, K) float32: the weight of the layer `name`, integers times scales."""
    scale = tensor(f"{name}.weight_scale").to(torch.float32)
    if scheme.bits == 8:
        return tensor(f"{name}.weight").to(torch.float32) * scale.view(-1, 1)
    if scheme.steps:
        return _stepped(name, tensor).expand().to(torch.float32) * scale.view(-1, 1)
    weight_NK = unpack_int4(tensor(f"{name}.weight_packed")).to(torch.float32)
    wide_NK = scale.repeat_interleave(scheme.group, dim=1)
    if not scheme.offsets:
        return weight_NK * wide_NK
    offset_NG = tensor(f"{name}.weight_offset").to(torch.float32)
    return (weight_NK + OFFSET) * wide_NK + offset_NG.repeat_interleave(scheme.group, dim=1)
