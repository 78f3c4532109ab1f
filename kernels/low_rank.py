"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) beside the linear layers of a decoder step.

Each chosen layer computes y = x · Wᵀ + scale · (x · Aᵀ) · Bᵀ. Several adapters share a step: each row names its own, or
none. Rows without one keep every bit that they have in a step without adapters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.kernels.cpu import library as abi

PROJECTIONS = ("q", "k", "v", "head_gate", "out", "gate", "up", "down")
_ONE_INPUT = (PROJECTIONS[:4], PROJECTIONS[4:5], PROJECTIONS[5:7], PROJECTIONS[7:])
BLOCK = 16  # outputs that are computed together
LINE = 64  # bytes that each matrix begins at a multiple of
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


Pages = Callable[[Sequence[int], torch.dtype], Tensor]
_Group = list[tuple[abi.LowRank, Tensor, Tensor]]  # pairs that read one input: what describes each, A and B


class StepAdapters:
    """The adapters of one decoder, laid out for the C++ extension, each in a slot; a free slot is used again."""

    def __init__(self, shapes: Sequence[Mapping[str, tuple[int, int]]], pages: Pages) -> None:
        """
        Args:
            shapes: for each layer the (N, K) of its linear layers, by the names of PROJECTIONS.
            pages: makes the memory that matrices lie in; large pages are what a step reads fast.
        """
        self._shapes, self._pages = shapes, pages
        self._slots: list[tuple[ctypes.Array[abi.LowRank], Tensor] | None] = []
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
        kept: list[_Group] = []
        for index, pairs in enumerate(layers):
            if unknown := pairs.keys() - self._shapes[index].keys():
                raise ValueError(
                    f"layer {index}: {min(unknown)!r} is no projection; those are {', '.join(self._shapes[index])}"
                )
            for names in _ONE_INPUT:
                kept.append([])
                for name in filter(pairs.__contains__, names):
                    row = rows[index * len(PROJECTIONS) + PROJECTIONS.index(name)]
                    where = f"layer {index}, {name}"
                    kept[-1].append((row, *_fill(row, where, pairs[name], self._shapes[index][name])))
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        self._slots[slot : slot + 1] = [(rows, _together(kept, self._pages))]
        self._point()
        return slot

    def remove(self, slot: int) -> None:
        """Free a slot that no step uses any more."""
        self._slots[slot] = None
        self._point()

    def _point(self) -> None:
        addresses = [None if held is None else ctypes.addressof(held[0]) for held in self._slots]
        self.table = (ctypes.c_void_p * len(addresses))(*addresses)


def _fill(row: abi.LowRank, where: str, pair: LowRank, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Describe `pair` in `row`, but for where it lies; A (R, K), and B in blocks of 16 outputs (N / 16, R, 16)."""
    rank = pair.a_RK.shape[0]
    if pair.a_RK.shape != (rank, shape[1]) or pair.b_NR.shape != (shape[0], rank):
        raise ValueError(
            f"{where}: A has shape {tuple(pair.a_RK.shape)} and B {tuple(pair.b_NR.shape)}; beside a layer {shape} "
            "they are (rank, inputs) and (outputs, rank)"
        )
    if pair.a_RK.dtype != pair.b_NR.dtype or pair.a_RK.dtype not in FLOATS or pair.a_RK.device.type != "cpu":
        raise ValueError(f"{where}: A is {pair.a_RK.dtype} and B {pair.b_NR.dtype}; both must be of one float type")
    padded_NR = torch.nn.functional.pad(pair.b_NR.detach(), (0, 0, 0, -shape[0] % BLOCK))
    row.n, row.k, row.rank, row.scale = *shape, rank, pair.scale
    row.dtype = abi.DTYPES[str(pair.a_RK.dtype).removeprefix("torch.")]
    return pair.a_RK.detach(), padded_NR.view(-1, BLOCK, rank).transpose(1, 2)


def _together(groups: Sequence[_Group], pages: Pages) -> Tensor:
    """Copy the matrices of each row behind each other, as steps read them, and say in the row where they lie. A step
    reads all of them for few rows, and waits for memory: of 4 KiB each, thousands of pages would be looked up."""
    order = [(row, name, pair[name == "b"]) for group in groups for name in "ab" for row, *pair in group]
    memory, begin = pages((sum(_lines(matrix) for _, _, matrix in order),), torch.uint8), 0
    for row, name, matrix in order:
        place = memory[begin : begin + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        setattr(row, name, place.copy_(matrix).data_ptr())
        begin += _lines(matrix)
    return memory


def _lines(matrix: Tensor) -> int:
    return -(-matrix.nbytes // LINE) * LINE
