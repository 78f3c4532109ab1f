"""Blocks of a GGUF file as integers in groups of 32 inputs, for the types whose values are whole steps of one scale.

    Q4_0  scale × (u − 8)        Q4_1  scale × u + offset        scale and offset in float16
    Q4_K  d × s × u − m × l      8 groups a block, d and m in float16, s and l of each group in 6 bits
    Q8_0  scale × q              q from −128 to 127

Products of float16 and 6 bits are exact in float32. Source: ggml-org/ggml, src/ggml-common.h and ggml-quants.c;
`compress/gguf/four_bits.py` writes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
PARTS = 8  # groups in a block of Q4_K
MIDDLE = 8


@dataclass(frozen=True)
class BlockWeight:
    """weight = code × scale + offset for each group of 32 inputs; of 8 bits without offset.

    Attributes:
        code_NK: (N, K), uint8 from 0 to 15, or int8.
        scale_NG, offset_NG: (N, K / 32) floating of one type, exact.
    """

    code_NK: Tensor  # noqa: N815
    scale_NG: Tensor  # noqa: N815
    offset_NG: Tensor | None  # noqa: N815

    def finite(self) -> bool:
        """Whether scales and offsets are numbers."""
        offsets = () if self.offset_NG is None else (self.offset_NG,)
        return all(bool(torch.isfinite(each).all()) for each in (self.scale_NG, *offsets))


def read_blocks(rows: Tensor, kind: str) -> BlockWeight | None:
    """The weight whose rows have the bytes `rows`, (N, bytes) uint8; None for another type than the four above."""
    if kind not in _READ:
        return None
    size, read = _READ[kind]
    return read(rows.unflatten(1, (-1, size)))


def _q4_0(blocks: Tensor) -> BlockWeight:
    scale_NG = _half(blocks[..., :2])
    offset_NG = -MIDDLE * scale_NG
    if not torch.isfinite(offset_NG).all():  # eight times a scale is exact, unless float16 ends there
        scale_NG = scale_NG.to(torch.float32)
        offset_NG = -MIDDLE * scale_NG
    return BlockWeight(_codes(blocks[..., 2:]), scale_NG, offset_NG)


def _q4_1(blocks: Tensor) -> BlockWeight:
    return BlockWeight(_codes(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q4_k(blocks: Tensor) -> BlockWeight:
    unit, floor = (_half(blocks[..., place : place + 2])[..., None].to(torch.float32) for place in (0, 2))
    first, second, last = blocks[..., 4:16].split(4, dim=-1)
    steps = torch.cat([first & 63, last & 15 | (first >> 6) << 4], dim=-1)
    floors = torch.cat([second & 63, last >> 4 | (second >> 6) << 4], dim=-1)
    nibbles = blocks[..., 16:].unflatten(-1, (PARTS // 2, GROUP))
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=-2)  # a group in the low halves, the next in the high ones
    return BlockWeight(codes.flatten(1), (unit * steps).flatten(1), (-floor * floors).flatten(1))


def _q8_0(blocks: Tensor) -> BlockWeight:
    return BlockWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks[..., :2]), None)


def _half(pairs: Tensor) -> Tensor:
    """(…, 2) bytes → (…) float16."""
    return pairs.contiguous().view(torch.float16).squeeze(-1)


def _codes(halves: Tensor) -> Tensor:
    """(N, G, 16) bytes whose low halves are the first 16 values of a block → (N, 32 G)."""
    return torch.cat([halves & 15, halves >> 4], dim=-1).flatten(1)


_READ: dict[str, tuple[int, Callable[[Tensor], BlockWeight]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q8_0": (34, _q8_0),
}
