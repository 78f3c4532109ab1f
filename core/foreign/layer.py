"""A linear layer that another program quantized, with its own integers: what every layout is read into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penjing.core.errors import InputError

BITS = (4, 8)
TERNARY, TERNARY_ZERO = 2, 2  # bits of a code of three values, and the code of 0
WORD = 32  # bits of a stored word
ROWS_AT_ONCE = 1024
FLOATING = ("F16", "BF16", "F32")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Grouped:
    """weight[n, k] = (code[n, k] − zero[n, g]) × scale[n, g] for the group g of the input k.

    Attributes:
        bits: 4 or 8; 2 where weights are −1, 0 or 1 times a scale.
        code_NK: (N, K) uint8, from 0 to 2^bits − 1.
        zero_NG: (N, G) uint8.
        scale_NG: (N, G) floating, as it was stored.
        group_K: (K,) int64, the group of each input; None: groups of K / G inputs lie together, the last may be short.
        size: inputs of a group.
    """

    bits: int
    code_NK: Tensor  # noqa: N815
    zero_NG: Tensor  # noqa: N815
    scale_NG: Tensor  # noqa: N815
    group_K: Tensor | None  # noqa: N815
    size: int

    def groups(self) -> Tensor:
        """(K,) int64: the group of each input."""
        if self.group_K is not None:
            return self.group_K
        return torch.arange(self.code_NK.shape[1]) // self.size

    def symmetric(self) -> bool:
        """Whether every zero is the middle, so that weights are integers around 0 times scales."""
        return bool((self.zero_NG == 1 << (self.bits - 1)).all())

    def dequantize(self) -> Tensor:
        """(N, K) float32: exact, since a code less a zero has at most 9 bits and a scale at most 24."""
        weight_NK = torch.empty(self.code_NK.shape, dtype=torch.float32)
        group_K = self.groups()
        for begin in range(0, len(weight_NK), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            steps_NK = self.code_NK[rows].to(torch.float32) - self.zero_NG[rows].to(torch.float32)[:, group_K]
            weight_NK[rows] = steps_NK * self.scale_NG[rows].to(torch.float32)[:, group_K]
        return weight_NK


class Folder(Protocol):
    """The stored tensors of a folder, by the names that they have in the model."""

    def stored(self, name: str) -> Tensor: ...

    def stored_shape(self, name: str) -> Shape: ...

    def stored_dtype(self, name: str) -> str: ...


class Packing(Protocol):
    """How one program stores quantized layers."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the tensors that stand for the weight of a layer."""
        ...

    def modules(self, names: Sequence[str]) -> list[str]:
        """The quantized layers among the tensors `names`."""
        ...

    def check(self, module: str, folder: Folder) -> Shape:
        """(N, K) of the layer, from the headers of the files alone.

        Raises:
            InputError: a tensor is missing, or its shape or type does not fit the others.
        """
        ...

    def read(self, module: str, folder: Folder) -> Grouped:
        """The layer.

        Raises:
            InputError: values that no writer of this layout makes.
        """
        ...


def unpacked(words: Tensor, bits: int) -> Tensor:
    """(…, W) int32 → (…, W, 32 / bits) uint8, the lowest bits of a word first."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def need(folder: Folder, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> Shape:
    """The shape of the tensor `name`, which must have one of `dtypes` and the sizes `shape`; None is any.

    Raises:
        InputError: it is missing, or another.
    """
    found, dtype = folder.stored_shape(name), folder.stored_dtype(name)
    fits = len(found) == len(shape) and all(want in (None, size) for want, size in zip(shape, found, strict=True))
    if dtype not in dtypes or not fits or 0 in found:
        wanted = " × ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name} is {dtype} of {list(found)}: {' or '.join(dtypes)} of {wanted} is needed here")
    return found


def finite(scale: Tensor, name: str) -> Tensor:
    """`scale`.

    Raises:
        InputError: it holds NaN or infinity.
    """
    if not torch.isfinite(scale).all():
        raise InputError(f"{name} holds values that are NaN or infinite: the scales overflowed when they were stored")
    return scale


def number(values: dict[str, Any], key: str, allowed: Callable[[int], bool], rule: str, source: str) -> int:
    """The whole number `key` of a quantization_config.

    Raises:
        InputError: it is missing, no whole number, or not `allowed`.
    """
    value = values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not allowed(value):
        raise InputError(f"{source}: {key} is {value!r}; penjing reads {rule}")
    return value


def group_size(values: dict[str, Any], source: str) -> int:
    """Inputs of a group; 0: all of them.

    Raises:
        InputError: no positive number, and not −1.
    """
    size = number(values, "group_size", lambda size: size == -1 or 0 < size < 1 << 20, "a size, or -1 for all", source)
    return max(0, size)


def num_groups(inputs: int, size: int) -> int:
    """Groups of `inputs`; a last one may be short."""
    return 1 if size == 0 else -(-inputs // size)
