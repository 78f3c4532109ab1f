"""compressed-tensors folders whose weights are integers, in 4 or 8 bits, whatever their activations are.

    pack-quantized  X.weight_packed (N, K × bits / 32) int32, X.weight_shape, X.weight_scale (N, G) and, if not
                    symmetric, X.weight_zero_point (N × bits / 32, G) int32; X.weight_g_idx (K,) where inputs are
                    grouped in the order of how active they are
    int-quantized   X.weight (N, K) int8, X.weight_scale (N, G), X.weight_zero_point (N, G) int8 if not symmetric

G is 1 for the strategy "channel", and one scale is for all of "tensor". Stored integers are signed: a code is one more
than half of the range above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.foreign.layer import (
    BITS,
    FLOATING,
    WORD,
    Folder,
    Grouped,
    Shape,
    finite,
    group_size,
    need,
    num_groups,
    number,
    unpacked,
)
from penjing.core.runtime.schemes import INT4_FORMAT, INT8_FORMAT, MIXED_FORMAT, by_module

PACKED = "weight_packed"


@dataclass(frozen=True)
class _Kind:
    """What a group of the quantization_config says of its weights."""

    bits: int
    size: int  # inputs of a group; 0: all
    symmetric: bool
    packed: bool
    one_scale: bool
    ordered: bool


class Compressed:
    """See `Packing`; `values` is the folder's quantization_config."""

    name = "compressed-tensors"
    suffixes = (
        PACKED,
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "k_scale",
        "v_scale",
    )

    def __init__(self, values: dict[str, Any], source: str) -> None:
        """Raises:
        InputError: a group of layers with another format, transforms, sparse weights.
        """
        for key in ("transform_config", "sparsity_config"):
            if values.get(key):
                raise InputError(f"{source}: {key} is set; penjing reads dense weights that nothing transforms")
        self._values, self._source = values, source
        self._kinds: dict[str, _Kind] = {}

    def modules(self, names: Sequence[str]) -> list[str]:
        """See `Packing`."""
        found = [name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")]
        self._kinds = by_module(self._values, found, self._kind)
        if lost := [name for name in found if name not in self._kinds]:
            raise InputError(f"{self._source}: {lost[0]} has a scale, but no group of quantization_config is for it")
        return found

    def check(self, module: str, folder: Folder) -> Shape:
        """See `Packing`."""
        kind = self._kinds[module]
        a_word = WORD // kind.bits
        if kind.packed:
            need(folder, f"{module}.weight_shape", ("I64", "I32"), (2,))
            outputs, inputs = (int(size) for size in folder.stored(f"{module}.weight_shape"))
            if outputs < 1 or inputs < 1:
                raise InputError(f"{module}.weight_shape says {outputs} × {inputs}; two sizes above 0 are needed")
            need(folder, f"{module}.{PACKED}", ("I32",), (outputs, -(-inputs // a_word)))
        else:
            outputs, inputs = need(folder, f"{module}.weight", ("I8",), (None, None))
        groups = num_groups(inputs, kind.size)
        if kind.one_scale:
            shape = folder.stored_shape(f"{module}.weight_scale")
            need(folder, f"{module}.weight_scale", FLOATING, [1] * len(shape))
        else:
            need(folder, f"{module}.weight_scale", FLOATING, (outputs, groups))
        if not kind.symmetric and kind.packed:
            need(folder, f"{module}.weight_zero_point", ("I32",), (-(-outputs // a_word), groups))
        elif not kind.symmetric:
            need(folder, f"{module}.weight_zero_point", ("I8",), folder.stored_shape(f"{module}.weight_scale"))
        if kind.ordered:
            need(folder, f"{module}.weight_g_idx", ("I32", "I64"), (inputs,))
        return outputs, inputs

    def read(self, module: str, folder: Folder) -> Grouped:
        """See `Packing`."""
        kind, (outputs, inputs) = self._kinds[module], self.check(module, folder)
        middle = 1 << (kind.bits - 1)
        if kind.packed:
            code_NK = unpacked(folder.stored(f"{module}.{PACKED}"), kind.bits).flatten(1)[:, :inputs]
        else:
            code_NK = _above(folder.stored(f"{module}.weight"), middle, f"{module}.weight")
        scale_NG = finite(folder.stored(f"{module}.weight_scale"), f"{module}.weight_scale")
        if kind.one_scale:
            scale_NG = scale_NG.reshape(1, 1).expand(outputs, 1)
        if kind.symmetric:
            zero_NG = torch.full(scale_NG.shape, middle, dtype=torch.uint8)
        elif kind.packed:
            zero_NG = unpacked(folder.stored(f"{module}.weight_zero_point").t(), kind.bits).flatten(1)[:, :outputs].t()
        else:
            name = f"{module}.weight_zero_point"
            zero_NG = _above(folder.stored(name), middle, name).reshape(-1, 1 if kind.one_scale else scale_NG.shape[1])
            zero_NG = zero_NG.expand(scale_NG.shape)
        size = kind.size or inputs
        group_K = None
        if kind.ordered:
            group_K = folder.stored(f"{module}.weight_g_idx").to(torch.int64)
            groups = scale_NG.shape[1]
            if int(group_K.min()) < 0 or int(group_K.max()) >= groups:
                raise InputError(f"{module}.weight_g_idx holds groups that are not among the {groups} that it has")
        return Grouped(kind.bits, code_NK.contiguous(), zero_NG.contiguous(), scale_NG.contiguous(), group_K, size)

    def _kind(self, name: str, group: dict[str, Any]) -> _Kind:
        where, layout = f"{self._source}: {name}", group.get("format") or self._values.get("format")
        if layout not in (INT4_FORMAT, INT8_FORMAT):
            known = f"{INT4_FORMAT}, {INT8_FORMAT} and {MIXED_FORMAT} of these"
            raise InputError(f"{where}.format is {layout!r}; penjing reads {known}")
        weights = group.get("weights")
        if not isinstance(weights, dict) or weights.get("type", "int") != "int" or weights.get("dynamic"):
            raise InputError(f"{where}.weights is {weights!r}; penjing reads integers with stored scales")
        bits = number(weights, "num_bits", lambda bits: bits in BITS, "4 and 8", f"{where}.weights")
        strategy, symmetric = weights.get("strategy"), weights.get("symmetric", True)
        if strategy not in ("group", "channel", "tensor") or not isinstance(symmetric, bool):
            raise InputError(
                f"{where}.weights has strategy {strategy!r} and symmetric {symmetric!r}; penjing reads a scale for "
                "each group, channel or tensor"
            )
        packed = layout == INT4_FORMAT
        if packed and strategy == "tensor":
            raise InputError(
                f"{where}.weights has strategy 'tensor'; packed ones have a scale for each group or channel"
            )
        return _Kind(
            bits=bits,
            size=group_size(weights, f"{where}.weights") if strategy == "group" else 0,
            symmetric=symmetric,
            packed=packed,
            one_scale=strategy == "tensor",
            ordered=weights.get("actorder") in ("group", True),
        )


def _above(integers: Tensor, middle: int, name: str) -> Tensor:
    """uint8 codes of signed integers from −middle to middle − 1.

    Raises:
        InputError: one is beyond.
    """
    low, high = (int(value) for value in torch.aminmax(integers))
    if low < -middle or high >= middle:
        raise InputError(f"{name} holds integers from {low} to {high}; {-middle} to {middle - 1} fit its bits")
    return (integers.to(torch.int16) + middle).to(torch.uint8)
