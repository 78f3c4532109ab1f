"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) beside the linear layers of a decoder step.

Each chosen layer computes y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ. Several adapters share a step: each row names its own, or
none. Rows without one keep every bit that they have in a step without adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.kernels.cpu import library as abi

PROJECTIONS = ("q", "k", "v", "out", "gate", "up", "down")
BLOCK = 16  # outputs that are computed together
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LowRank:
    """A pair beside one linear layer (N, K): a_RK and b_NR of one float dtype, and the factor of their product."""

    a_RK: Tensor  # noqa: N815
    b_NR: Tensor  # noqa: N815
    scale: float


Pairs = Sequence[Mapping[str, LowRank]]
"""For each layer its pairs, by the names of PROJECTIONS; those that are left out have none."""


def low_rank(x_MK: Tensor, pair: LowRank) -> Tensor:
    """(M, N) float32, what `pair` adds to the outputs of its layer for x_MK; the reference of the C++ step."""
    low_MR = x_MK.float() @ pair.a_RK.float().t()
    return (low_MR @ pair.b_NR.float().t()) * pair.scale


class StepAdapters:
    """The adapters of one decoder, laid out for the C++ extension, each in a slot; a free slot is used again."""

    def __init__(self, shapes: Sequence[Mapping[str, tuple[int, int]]]) -> None:
        """
        Args:
            shapes: for each layer the (N, K) of its linear layers, by the names of PROJECTIONS.
        """
        self._shapes = shapes
        self._slots: list[tuple[ctypes.Array[abi.LowRank], list[Tensor]] | None] = []
        self.table: ctypes.Array[ctypes.c_void_p] = (ctypes.c_void_p * 0)()
        """What a step is given: a pointer for each slot, null for a free one."""

    def add(self, layers: Pairs) -> int:
        """Take an adapter in; its slot.

        Raises:
            ValueError: a projection that there is not, a wrong shape or dtype.
        """
        if len(layers) != len(self._shapes):
            raise ValueError(f"an adapter of {len(layers)} layers beside a decoder of {len(self._shapes)}")
        rows = (abi.LowRank * (len(layers) * len(PROJECTIONS)))()
        kept: list[Tensor] = []
        for index, pairs in enumerate(layers):
            if unknown := pairs.keys() - set(PROJECTIONS):
                raise ValueError(
                    f"layer {index}: {min(unknown)!r} is no projection; those are {', '.join(PROJECTIONS)}"
                )
            for place, name in enumerate(PROJECTIONS):
                if name in pairs:
                    where = f"layer {index}, {name}"
                    rows[index * len(PROJECTIONS) + place] = _row(where, pairs[name], self._shapes[index][name], kept)
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        self._slots[slot : slot + 1] = [(rows, kept)]
        self._point()
        return slot

    def remove(self, slot: int) -> None:
        """Free a slot that no step uses any more."""
        self._slots[slot] = None
        self._point()

    def _point(self) -> None:
        addresses = [None if held is None else ctypes.addressof(held[0]) for held in self._slots]
        self.table = (ctypes.c_void_p * len(addresses))(*addresses)


def _row(where: str, pair: LowRank, shape: tuple[int, int], kept: list[Tensor]) -> abi.LowRank:
    rank = pair.a_RK.shape[0]
    if pair.a_RK.shape != (rank, shape[1]) or pair.b_NR.shape != (shape[0], rank):
        raise ValueError(
            f"{where}: A has shape {tuple(pair.a_RK.shape)} and B {tuple(pair.b_NR.shape)}; beside a layer {shape} "
            "they are (rank, inputs) and (outputs, rank)"
        )
    if pair.a_RK.dtype != pair.b_NR.dtype or pair.a_RK.dtype not in FLOATS or pair.a_RK.device.type != "cpu":
        raise ValueError(f"{where}: A is {pair.a_RK.dtype} and B {pair.b_NR.dtype}; both must be of one float type")
    a_RK, padding = pair.a_RK.detach().contiguous(), -shape[0] % BLOCK
    b_NR = torch.nn.functional.pad(pair.b_NR.detach(), (0, 0, 0, padding))
    blocks = b_NR.view(-1, BLOCK, rank).transpose(1, 2).contiguous()
    kept += [a_RK, blocks]
    dtype = abi.DTYPES[str(pair.a_RK.dtype).removeprefix("torch.")]
    return abi.LowRank(a_RK.data_ptr(), blocks.data_ptr(), shape[0], shape[1], rank, pair.scale, dtype)
