"""INT8 weights that are stored in 4 bits: in a group of inputs a weight is offset + step × u for u in [0, 15].

Scales of groups are whole numbers on top of one float scale a row: w[n, k] ≈ scale[n] × (offset[n, g] + step[n, g] ×
u[n, k]), with the bracket inside [−127, 127]. So the layer is an INT8 layer, of `kernels.int8_linear`, that reads half
of the bytes: no sum of a group becomes a float before the row's sum is done, which is what float scales cost for many
rows (QServe's progressive group quantization, https://arxiv.org/abs/2405.04532; there offsets are whole steps).

The C++ kernels expand some inputs of a panel to bytes, once for many rows. Everything else expands all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penjing.kernels.cpu.packing import LARGEST_STEPPED_GROUP, LEAST_GROUP
from penjing.kernels.rounding import INT8_LIMIT

LARGEST_NUMBER = 15  # of steps
NUMBERS_A_WORD = 8
LARGEST_STEP = 16  # 15 of them span 240 of the 254 between -127 and 127


@dataclass(frozen=True, eq=False)
class SteppedInt8:
    """An INT8 weight (N, K) in steps, checked by `stepped_int8`."""

    packed_NK8: torch.Tensor  # noqa: N815  int32: `kernels.int4_linear.pack_int4` of u − 8
    step_NG2: torch.Tensor  # noqa: N815  int8, of each group its step and its offset

    @property
    def group(self) -> int:
        """Inputs that share a step."""
        return self.shape[1] // self.step_NG2.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.packed_NK8.shape[0], NUMBERS_A_WORD * self.packed_NK8.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.packed_NK8.device

    def rows(self, rows: slice) -> SteppedInt8:
        """Some outputs; views."""
        return SteppedInt8(self.packed_NK8[rows], self.step_NG2[rows])

    def expand(self) -> torch.Tensor:
        """(N, K) int8."""
        pairs = self.packed_NK8.view(torch.uint8)  # the first of two numbers in the lower half
        number_NK = torch.stack([pairs & 15, pairs >> 4], dim=-1).to(torch.int8)
        number_NGB = number_NK.view(*self.step_NG2.shape[:2], self.group)
        return (number_NGB * self.step_NG2[..., :1] + self.step_NG2[..., 1:]).flatten(1)


def stepped_int8(packed_NK8: torch.Tensor, step_NG: torch.Tensor, offset_NG: torch.Tensor) -> SteppedInt8:
    """Check a weight in steps.

    Args:
        packed_NK8: (N, K / 8) int32, `kernels.int4_linear.pack_int4` of u − 8.
        step_NG: (N, G) int8 from 1 to 16, each of K / G inputs that follow each other, a multiple of 32 up to 256.
        offset_NG: (N, G) int8, from −127 to 127 − 15 × step.

    Raises:
        ValueError: a wrong shape, dtype or device, groups that do not fit, or a weight that may leave INT8.
    """
    if packed_NK8.dim() != 2 or packed_NK8.dtype != torch.int32 or 0 in packed_NK8.shape:
        raise ValueError(f"packed_NK8 is {tuple(packed_NK8.shape)} {packed_NK8.dtype}; int32 (N, K / 8) is needed")
    rows, inputs = packed_NK8.shape[0], NUMBERS_A_WORD * packed_NK8.shape[1]
    if step_NG.dim() != 2 or len(step_NG) != rows or step_NG.dtype != torch.int8:
        raise ValueError(f"step_NG is {tuple(step_NG.shape)} {step_NG.dtype}; int8 ({rows}, groups) is needed")
    if offset_NG.shape != step_NG.shape or offset_NG.dtype != torch.int8:
        raise ValueError(
            f"offset_NG is {tuple(offset_NG.shape)} {offset_NG.dtype}; int8 {tuple(step_NG.shape)} is needed"
        )
    for name, tensor in (("step_NG", step_NG), ("offset_NG", offset_NG)):
        if tensor.device != packed_NK8.device:
            raise ValueError(f"{name} is on {tensor.device}, packed_NK8 on {packed_NK8.device}")
    groups = step_NG.shape[1]
    if groups == 0 or inputs % groups or inputs // groups % LEAST_GROUP or inputs // groups > LARGEST_STEPPED_GROUP:
        raise ValueError(
            f"{inputs} inputs in {groups} groups: groups of a multiple of {LEAST_GROUP} inputs, at most "
            f"{LARGEST_STEPPED_GROUP}, are needed"
        )
    least, most = (int(value) for value in torch.aminmax(step_NG))
    if least < 1 or most > LARGEST_STEP:
        raise ValueError(f"step_NG holds values from {least} to {most}; steps are from 1 to {LARGEST_STEP}")
    if int(offset_NG.min()) < -INT8_LIMIT:
        raise ValueError(f"offset_NG holds {int(offset_NG.min())}; INT8 weights are from -{INT8_LIMIT} to {INT8_LIMIT}")
    highest = int((offset_NG.to(torch.int32) + LARGEST_NUMBER * step_NG.to(torch.int32)).max())
    if highest > INT8_LIMIT:
        raise ValueError(f"an offset and {LARGEST_NUMBER} steps reach {highest}, beyond the {INT8_LIMIT} of INT8")
    return SteppedInt8(packed_NK8.contiguous(), torch.stack([step_NG, offset_NG], dim=-1))
