"""Folders of gpt-oss, which hold the experts of a layer together, in MXFP4 as they were published.

MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of 4 bits, two a byte, the first in its low half, share an exponent.
Each of them is a bfloat16 exactly.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.folded.gpt_oss import NAME
from penjing.core.folded.weights import FoldedCheckpoint
from penjing.core.models.tensor_names import Slice

METHOD = "mxfp4"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4 bits without the sign, which is the highest
_GROUP = 32
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales|)")


class _Part(NamedTuple):
    """Where a tensor of an expert lies."""

    stack: str  # of all experts of the layer
    expert: int
    kind: str  # "gate", "up", "down"
    is_bias: bool


class GptOssCheckpoint(FoldedCheckpoint):
    """A folder of gpt-oss, which reads like a checkpoint of the network that it becomes, one expert at a time.

    Raises:
        InputError: it is quantized by another program, or tensors do not fit each other.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        method = None if self.quantization is None else self.quantization.get("quant_method")
        if method not in (None, METHOD):
            raise InputError(f"{folder / 'config.json'}: quant_method is {method!r}; of {NAME} {METHOD} is read")

    def get(self, name: str) -> Tensor:
        """See `Checkpoint`; what is stored in MXFP4 in bfloat16."""
        part = _part_of(name)
        if part is None:
            return super().get(name)
        if part.is_bias:
            return _own(self._slice(f"{part.stack}_bias", part.expert), part.kind).clone()
        if f"{part.stack}_blocks" in self._there:
            blocks = self._slice(f"{part.stack}_blocks", part.expert)
            whole_NK = _from_mxfp4(blocks, self._slice(f"{part.stack}_scales", part.expert))
        else:
            whole_NK = self._slice(part.stack, part.expert).t()
        return _own(whole_NK, part.kind).contiguous()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        part = _part_of(name)
        if part is None:
            return super().shape(name)
        stored = f"{part.stack}_blocks" if f"{part.stack}_blocks" in self._there else part.stack
        stored = f"{part.stack}_bias" if part.is_bias else stored
        shape, count = self._shape_of(stored), 0 if self.config.moe is None else self.config.moe.num_experts
        if shape[:1] != (count,):
            raise InputError(f"{self.folder}: {stored} has shape {shape}; config.json names {count} experts")
        if part.is_bias:
            sizes = shape[1:]
        elif stored == part.stack:
            sizes = shape[:0:-1]
        else:
            sizes = self._unpacked(stored, f"{part.stack}_scales")
        return sizes if part.kind == "down" or not sizes else (sizes[0] // 2, *sizes[1:])

    def _unpacked(self, blocks: str, scales: str) -> tuple[int, int]:
        """(rows, inputs) of an expert in MXFP4."""
        shape, of_scales = self._shape_of(blocks), self._shape_of(scales)
        kinds = {self._dtype_of(name) for name in (blocks, scales)}
        if len(shape) != 4 or shape[-1] != _GROUP // 2 or of_scales != shape[:3] or kinds != {"U8"}:
            raise InputError(
                f"{self.folder}: {blocks} has shape {shape} and its scales {of_scales}; bytes, (experts, rows, groups, "
                "16) and one for each group, are needed. Get the folder again"
            )
        return shape[1], shape[2] * _GROUP

    def dtype(self, name: str) -> str:
        """See `Checkpoint`."""
        part = _part_of(name)
        if part is None:
            return super().dtype(name)
        if not part.is_bias and f"{part.stack}_blocks" in self._there:
            return "BF16"
        return self._dtype_of(f"{part.stack}_bias" if part.is_bias else part.stack)

    def _slice(self, theirs: str, expert: int) -> Tensor:
        reader, stored, _ = self._locate(theirs)
        try:
            return reader.get_slice(stored)[expert]
        except SafetensorError as error:
            raise InputError(f"{self.folder}: cannot read {stored}: {error}") from error

    def _dtype_of(self, theirs: str) -> str:
        reader, stored, _ = self._locate(theirs)
        return reader.get_slice(stored).get_dtype()

    def _shape_of(self, theirs: str) -> tuple[int, ...]:
        reader, stored, _ = self._locate(theirs)
        return tuple(reader.get_slice(stored).get_shape())

    def _experts_in(self, stored: str, num_experts: int) -> dict[str, Slice]:
        return {}  # its stacks lie otherwise

    def _parts_of(self, stored: str) -> list[str]:
        found = _STACK.fullmatch(stored)
        if found is None:
            return super()._parts_of(stored)
        layer, which, suffix = found.groups()
        if suffix == "_scales":
            return []
        assert self.config.moe is not None
        kinds, leaf = ("gate", "up") if which == "gate_up" else ("down",), "bias" if suffix == "_bias" else "weight"
        return [
            f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.{leaf}"
            for expert in range(self.config.moe.num_experts)
            for kind in kinds
        ]


def _part_of(name: str) -> _Part | None:
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    layer, expert, kind, leaf = found.groups()
    stack = f"model.layers.{layer}.mlp.experts.{'down' if kind == 'down' else 'gate_up'}_proj"
    return _Part(stack, int(expert), kind, leaf == "bias")


def _own(rows: Tensor, kind: str) -> Tensor:
    """Of the rows of gate and up, which take turns, those of one; all of down."""
    return rows if kind == "down" else rows[int(kind == "up") :: 2]


def _from_mxfp4(blocks_NGB: Tensor, scale_NG: Tensor) -> Tensor:
    """(N, G, 16) and (N, G) bytes → (N, 32 G) bfloat16."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32)
    codes = torch.stack((blocks_NGB & 15, blocks_NGB >> 4), dim=-1).flatten(2).long()
    exponent = scale_NG.to(torch.int32)[..., None] - 127
    return torch.ldexp(table[codes], exponent).flatten(1).to(torch.bfloat16)
