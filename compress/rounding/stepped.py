"""4-bit weights whose groups have whole numbers for scales: INT8 weights offset + step × u, see `kernels.stepped`.

A row's scale is the one of five near its largest magnitude over 127 with which nearest rounding loses least. It has
four significant bits, so that its products with steps and offsets are exact in float16: GGUF's Q4_1 holds them. A
group's step and offset are looked for among the step that spans the group and three smaller ones, which clip, each with
the offset that is in the middle and then refined by least squares. Errors are weighted by how much each input counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.compress.rounding.descent import Lattice, descend
from penjing.kernels.int4_linear import OFFSET, pack_int4
from penjing.kernels.rounding import INT8_LIMIT
from penjing.kernels.stepped import LARGEST_NUMBER, LARGEST_STEP, SteppedInt8, stepped_int8

SMALLER_STEPS = 3
REFINEMENTS = 2
UNITS = 8  # a scale is 5 to 16 times a power of two
BESIDE = range(-3, 2)  # units that the scales of a row that are tried are away from that of its largest magnitude
ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class SteppedWeight:
    """weight ≈ scale_N1 × (offset_NG + step_NG × (number_NK + 8)): float32 and int8, numbers in [−8, 7]."""

    number_NK: Tensor  # noqa: N815
    step_NG: Tensor  # noqa: N815
    offset_NG: Tensor  # noqa: N815
    scale_N1: Tensor  # noqa: N815

    @property
    def stored(self) -> SteppedInt8:
        """Checked, as the runtime holds it."""
        return stepped_int8(pack_int4(self.number_NK), self.step_NG, self.offset_NG)

    def dequantize(self) -> Tensor:
        """(N, K) float32."""
        return self.stored.expand().to(torch.float32) * self.scale_N1


def quantize_stepped(weight_NK: Tensor, group: int, importance_K: Tensor) -> SteppedWeight:
    """Round to nearest.

    Args:
        weight_NK: (N, K) float32.
        group: inputs that share a step; it divides K.
        importance_K: (K,) mean square of each input.
    """
    importance_K = importance_K.clamp(min=float(importance_K.mean()) * 1e-6 + torch.finfo(torch.float32).tiny)
    scale_N = _row_scale(weight_NK, group, importance_K)
    weight_NGB = (weight_NK / scale_N[:, None]).unflatten(1, (-1, group))
    step_NG, offset_NG, _ = _fit(weight_NGB, importance_K.view(-1, group))
    number_NGB = _numbers(weight_NGB, step_NG[..., None], offset_NG[..., None])
    return _stepped(number_NGB.flatten(1), step_NG, offset_NG, scale_N)


def quantize_stepped_compensated(weight_NK: Tensor, group: int, spread_KK: Tensor) -> SteppedWeight:
    """Round column by column, the errors made up for by the columns that follow; a group's step and offset are found
    when it is reached, of what its weights have become by then. Then all are improved (`descent`).

    Args:
        weight_NK: (N, K) float32; it is not changed.
        group: inputs that share a step; it divides K.
        spread_KK: of `compensate.error_spread`, for the activations that the weight reads.
    """
    num_rows, num_columns = weight_NK.shape
    importance_K = spread_KK.diagonal().square().reciprocal()
    scale_N = _row_scale(weight_NK, group, importance_K)
    left_NK = weight_NK / scale_N[:, None]  # in units of the scale
    number_NK, steps, offsets = torch.empty(weight_NK.shape), list[Tensor](), list[Tensor]()
    for begin in range(0, num_columns, group):
        end = begin + group
        step_N, offset_N, _ = _fit(left_NK[:, begin:end], importance_K[begin:end])
        steps.append(step_N)
        offsets.append(offset_N)
        block_BN, errors_BN = left_NK[:, begin:end].t().contiguous(), torch.empty(group, num_rows)
        factors_BB = spread_KK[begin:end, begin:end]
        for place in range(group):
            number_N = _numbers(block_BN[place], step_N, offset_N)
            number_NK[:, begin + place] = number_N
            errors_BN[place] = (block_BN[place] - (number_N * step_N + offset_N)) / factors_BB[place, place]
            block_BN[place + 1 :].addr_(factors_BB[place, place + 1 :], errors_BN[place], alpha=-1)
        left_NK[:, end:] -= errors_BN.t() @ spread_KK[begin:end, end:]
    found = Lattice(number_NK, torch.stack(steps, dim=1), torch.stack(offsets, dim=1), 0, LARGEST_NUMBER)
    descend(weight_NK / scale_N[:, None], found, spread_KK, _whole)
    assert found.offset_NG is not None
    return _stepped(found.number_NK, found.step_NG, found.offset_NG, scale_N)


def _whole(step_N: Tensor, _: Tensor, best_offset: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """`descent.Grids` of whole numbers that stay inside INT8."""
    for by in (0, -1, 1):
        new_N = (step_N + by).clamp(1, LARGEST_STEP)
        yield (
            new_N,
            torch.minimum(best_offset(new_N).round().clamp(min=-INT8_LIMIT), INT8_LIMIT - LARGEST_NUMBER * new_N),
        )


def _stepped(number_NK: Tensor, step_NG: Tensor, offset_NG: Tensor, scale_N: Tensor) -> SteppedWeight:
    numbers = (number_NK - OFFSET).to(torch.int8)
    return SteppedWeight(numbers, step_NG.to(torch.int8), offset_NG.to(torch.int8), scale_N[:, None].contiguous())


def _numbers(weight: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    return ((weight - offset) / step).round_().clamp_(0, LARGEST_NUMBER)


def _row_scale(weight_NK: Tensor, group: int, importance_K: Tensor) -> Tensor:
    """(N,) float32; 1 for a row of zeros."""
    found = list[Tensor]()
    for rows_NK in weight_NK.split(ROWS_AT_ONCE):
        largest_N = rows_NK.abs().amax(dim=1) / INT8_LIMIT
        mantissa_N, exponent_N = torch.frexp(torch.where(largest_N == 0, 1.0, largest_N))
        whole_N = (mantissa_N * 2 * UNITS).floor()  # 8 to 15
        best_N, least_N = torch.ones_like(largest_N), torch.full_like(largest_N, torch.inf)
        for units in BESIDE:
            scale_N = torch.ldexp((whole_N + units) / (2 * UNITS), exponent_N)
            lost_NG = _fit((rows_NK / scale_N[:, None]).unflatten(1, (-1, group)), importance_K.view(-1, group))[2]
            lost_N = lost_NG.sum(dim=1) * scale_N.square()
            better_N = lost_N < least_N
            best_N[better_N], least_N[better_N] = scale_N[better_N], lost_N[better_N]
        found.append(best_N)
    return torch.cat(found)


def _fit(weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Step and offset of each group, whole numbers in float32, and the weighted squared error.

    Args:
        weight: (…, B) of groups, in units of their row's scale.
        importance: (…, B) or what broadcasts to it.
    """
    low, high = torch.aminmax(weight, dim=-1)
    middle, total = (low + high) / 2, importance.sum(dim=-1)
    widest = ((high - low) / LARGEST_NUMBER).ceil()
    best_step, best_offset = torch.ones_like(low), torch.zeros_like(low)
    least = torch.full_like(low, torch.inf)
    for smaller in range(SMALLER_STEPS + 1):
        step = (widest - smaller).clamp(1, LARGEST_STEP)
        offset = middle - LARGEST_NUMBER / 2 * step
        for _ in range(REFINEMENTS + 1):
            offset = torch.minimum(offset.round().clamp(min=-INT8_LIMIT), INT8_LIMIT - LARGEST_NUMBER * step)
            above = weight - _numbers(weight, step[..., None], offset[..., None]) * step[..., None]
            lost = ((above - offset[..., None]).square() * importance).sum(dim=-1)
            better = lost < least
            least = torch.where(better, lost, least)
            best_step, best_offset = torch.where(better, step, best_step), torch.where(better, offset, best_offset)
            offset = (above * importance).sum(dim=-1) / total
    return best_step, best_offset, least
