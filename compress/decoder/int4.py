"""4-bit weights in groups of inputs, each with the scale that loses least, rounded to nearest or compensated (GPTQ).

A group's scale is looked for among the largest magnitude over 7 and smaller ones, which clip: the one with the least
squared error, weighted by how much an error of each input counts. The best one is refined once by least squares. Scales
are stored in bfloat16, which holds the range of float32, and weights are rounded with the scale as it is stored.

With offsets a group has 16 steps from its smallest weight to its largest, or from and to less, which clips at both
ends. Scale and offset are stored in float16, as llama.cpp's Q4_1 stores them, so that weights which lie on such a grid
already are kept exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.compress.rounding.descent import Grids, Lattice, descend
from penjing.core.errors import InputError
from penjing.kernels.int4_linear import OFFSET, pack_int4

LOW, HIGH = -8, 7
STEPS = HIGH - LOW
INWARD = tuple(step / 50 for step in range(8))  # shares of a group's range that are clipped at each end
LEAST_SCALE = 2.0**-14  # the smallest normal float16, for groups whose weights are all equal
# Of the largest magnitude of a group: 1 / 7 reaches it exactly, 1 / 12 clips everything beyond 0.58 of it.
RATIOS = tuple(1 / (7 + step / 4) for step in range(21))
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class GroupedWeight:
    """weight ≈ weight_NK × scale_NG, each scale for K / G inputs: int8 in [−8, 7] and bfloat16; with offsets, float16
    as scales then are, weight ≈ (weight_NK + 8) × scale_NG + offset_NG."""

    weight_NK: Tensor  # noqa: N815
    scale_NG: Tensor  # noqa: N815
    offset_NG: Tensor | None = None  # noqa: N815

    def dequantize(self) -> Tensor:
        """(N, K) float32."""
        group = self.weight_NK.shape[1] // self.scale_NG.shape[1]
        weight_NK, scale_NK = self.weight_NK.to(torch.float32), _widened(self.scale_NG, group)
        if self.offset_NG is None:
            return weight_NK * scale_NK
        return (weight_NK + OFFSET) * scale_NK + _widened(self.offset_NG, group)

    def packed(self) -> Tensor:
        """(N, K / 8) int32, see `kernels.int4_linear`."""
        return pack_int4(self.weight_NK)


@dataclass(frozen=True)
class Grid:
    """The values that a group of each row can take: scale_N × w + middle_N for integers w in [−8, 7].

    Attributes:
        scale_N: (N,) as stored.
        offset_N: (N,) as stored, middle_N = offset_N + 8 × scale_N; None: the middle is 0.
    """

    scale_N: Tensor  # noqa: N815
    offset_N: Tensor | None = None  # noqa: N815

    def wide(self) -> tuple[Tensor, Tensor]:
        """Scale and middle, (N,) float32."""
        scale_N = self.scale_N.to(torch.float32)
        if self.offset_N is None:
            return scale_N, torch.zeros_like(scale_N)
        return scale_N, self.offset_N.to(torch.float32) + OFFSET * scale_N


def whole_range(weight_NK: Tensor, importance_K: Tensor) -> Grid:
    """A `Fit`: as `group_range`, but an offset is −z × scale for a whole z from 0 to 15: zero is on the grid, and
    other programs can store z. Scales have 7 bits, so that the product is exact in float16.

    Raises:
        InputError: a weight is beyond float16.
    """
    least_N, most_N = torch.aminmax(weight_NK, dim=1)
    most_N, least_N = most_N.clamp(min=0), least_N.clamp(max=0)  # zero is on the grid
    if not (most_N - least_N < torch.finfo(torch.float16).max / 2).all():  # a rounded offset is above the least weight
        raise InputError(
            f"a weight is {float(weight_NK.abs().max()):g}, beyond float16, as offsets are stored: take offsets=false"
        )
    scale_N, zero_N = torch.full_like(least_N, LEAST_SCALE), torch.zeros_like(least_N)
    lost_N = torch.full_like(least_N, torch.inf)
    width_N = most_N - least_N
    for share in INWARD:
        new_scale_N = _seven_bits(width_N * (1 - 2 * share) / STEPS).clamp(min=LEAST_SCALE)
        middle_N = (-(least_N + share * width_N) / new_scale_N).round()
        for step in (-1, 0, 1):
            new_zero_N = (middle_N + step).clamp(0, STEPS)
            steps_NK = ((weight_NK / new_scale_N[:, None]).round_() + new_zero_N[:, None]).clamp_(0, STEPS)
            error_NK = weight_NK - (steps_NK - new_zero_N[:, None]) * new_scale_N[:, None]
            new_lost_N = error_NK.square_() @ importance_K
            better_N = new_lost_N < lost_N
            for best_N, new_N in ((scale_N, new_scale_N), (zero_N, new_zero_N), (lost_N, new_lost_N)):
                best_N[better_N] = new_N[better_N]
    return Grid(scale_N.to(torch.float16), (-zero_N * scale_N).to(torch.float16))


def _seven_bits(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 128).round() / 128, exponent)


Fit = Callable[[Tensor, Tensor], Grid]
"""weight_NK (N, K) float32 of one group, importance_K (K,) how much a squared error of each input counts → its grid."""


def group_range(weight_NK: Tensor, importance_K: Tensor) -> Grid:
    """A `Fit`: of each row the float16 scale and offset that lose least.

    Raises:
        InputError: a weight is beyond float16.
    """
    least_N, most_N = torch.aminmax(weight_NK, dim=1)
    if not (most_N.abs().maximum(least_N.abs()) < torch.finfo(torch.float16).max).all():
        raise InputError(
            f"a weight is {float(weight_NK.abs().max()):g}, beyond float16, as offsets are stored: take offsets=false"
        )
    scale_N = torch.full_like(least_N, LEAST_SCALE)
    offset_N, lost_N = least_N.to(torch.float16).to(torch.float32), torch.full_like(least_N, torch.inf)

    def consider(new_scale_N: Tensor, new_offset_N: Tensor) -> None:
        stored_N = new_scale_N.to(torch.float16).to(torch.float32)
        stored_N = torch.where(stored_N > 0, stored_N, LEAST_SCALE)
        low_N = new_offset_N.to(torch.float16).to(torch.float32)
        steps_NK = ((weight_NK - low_N[:, None]) / stored_N[:, None]).round_().clamp_(0, STEPS)
        error_NK = weight_NK - (steps_NK * stored_N[:, None] + low_N[:, None])
        new_lost_N = error_NK.square_() @ importance_K
        better_N = new_lost_N < lost_N
        for best_N, new_N in ((scale_N, stored_N), (offset_N, low_N), (lost_N, new_lost_N)):
            best_N[better_N] = new_N[better_N]

    width_N = most_N - least_N
    for share in INWARD:
        consider(width_N * (1 - 2 * share) / STEPS, least_N + share * width_N)
    for _ in range(2):  # least squares of the steps that are taken
        steps_NK = ((weight_NK - offset_N[:, None]) / scale_N[:, None]).round_().clamp_(0, STEPS)
        total = importance_K.sum()
        mean_N, middle_N = steps_NK @ importance_K / total, weight_NK @ importance_K / total
        apart_NK = steps_NK - mean_N[:, None]
        slope_N = (apart_NK * weight_NK) @ importance_K / (apart_NK.square() @ importance_K).clamp(min=1e-30)
        consider(slope_N, middle_N - slope_N * mean_N)
    return Grid(scale_N.to(torch.float16), offset_N.to(torch.float16))


def group_scale(weight_NK: Tensor, importance_K: Tensor) -> Grid:
    """A `Fit`: of each row of the group `weight_NK` the bfloat16 scale that loses least; 1 for a row of zeros.

    Args:
        weight_NK: (N, K) float32 of one group.
        importance_K: (K,) how much a squared error of each input counts, positive.
    """
    largest_N = weight_NK.abs().amax(dim=1)
    best_N = torch.ones_like(largest_N)
    least_N = torch.full_like(largest_N, torch.inf)

    def consider(scale_N: Tensor) -> None:
        # A group of numbers so small that their scale is no normal number is stored as zeros.
        stored_N = scale_N.to(torch.bfloat16).to(torch.float32)
        usable_N = stored_N.abs() >= torch.finfo(torch.bfloat16).tiny
        stored_N = torch.where(usable_N, stored_N, 1.0)
        error_NK = weight_NK - _rounded(weight_NK / stored_N[:, None]) * stored_N[:, None]
        lost_N = error_NK.square_() @ importance_K
        better_N = lost_N < least_N
        best_N[better_N], least_N[better_N] = stored_N[better_N], lost_N[better_N]

    for ratio in RATIOS:
        consider(largest_N * ratio)
    integers_NK = _rounded(weight_NK / best_N[:, None])
    square_N = integers_NK.square() @ importance_K
    consider((weight_NK * integers_NK) @ importance_K / square_N.clamp(min=torch.finfo(torch.float32).tiny))
    return Grid(best_N.to(torch.bfloat16))


def quantize_grouped(weight_NK: Tensor, group: int, importance_K: Tensor, fit: Fit = group_scale) -> GroupedWeight:
    """Round to nearest.

    Args:
        weight_NK: (N, K) float32.
        group: inputs that share a scale; it divides K.
        importance_K: (K,) mean square of each input.
        fit: how a group's grid is found.
    """
    importance_K = importance_K.clamp(min=float(importance_K.mean()) * 1e-6 + torch.finfo(torch.float32).tiny)
    grids, rounded = list[Grid](), list[Tensor]()
    for part_NK, part_K in zip(weight_NK.split(group, dim=1), importance_K.split(group), strict=True):
        grids.append(_joined([fit(rows, part_K) for rows in part_NK.split(ROWS_AT_ONCE)]))
        scale_N, middle_N = grids[-1].wide()
        rounded.append(_rounded((part_NK - middle_N[:, None]) / scale_N[:, None]).to(torch.int8))
    return _grouped(torch.cat(rounded, dim=1), grids)


def quantize_grouped_compensated(
    weight_NK: Tensor, group: int, spread_KK: Tensor, fit: Fit = group_scale
) -> GroupedWeight:
    """Round column by column, the errors made up for by the columns that follow; a group's scales are found when it is
    reached, of what its weights have become by then. Then all are improved (`compress.rounding.descent`), but not the
    grids of `whole_range`.

    Args:
        weight_NK: (N, K) float32; it is not changed.
        group: inputs that share a scale; it divides K.
        spread_KK: of `compensate.error_spread`, for the activations that the weight reads.
        fit: how a group's grid is found.
    """
    num_rows, num_columns = weight_NK.shape
    # The error that is left of a column when those behind it have made up for what they can.
    importance_K = spread_KK.diagonal().square().reciprocal()
    left_NK = weight_NK.clone()
    quantized_NK, grids = torch.empty(weight_NK.shape, dtype=torch.int8), list[Grid]()
    for begin in range(0, num_columns, group):
        end = begin + group
        grids.append(fit(left_NK[:, begin:end], importance_K[begin:end]))
        scale_N, middle_N = grids[-1].wide()
        block_BN, errors_BN = left_NK[:, begin:end].t().contiguous(), torch.empty(group, num_rows)
        factors_BB = spread_KK[begin:end, begin:end]
        for place in range(group):
            rounded_N = _rounded((block_BN[place] - middle_N) / scale_N)
            quantized_NK[:, begin + place] = rounded_N.to(torch.int8)
            errors_BN[place] = (block_BN[place] - (rounded_N * scale_N + middle_N)) / factors_BB[place, place]
            block_BN[place + 1 :].addr_(factors_BB[place, place + 1 :], errors_BN[place], alpha=-1)
        left_NK[:, end:] -= errors_BN.t() @ spread_KK[begin:end, end:]
    wide = [grid.wide() for grid in grids]
    scale_NG, middle_NG = (torch.stack(list(each), dim=1) for each in zip(*wide, strict=True))
    found = Lattice(quantized_NK.to(torch.float32), scale_NG, None if fit is group_scale else middle_NG, LOW, HIGH)
    descend(weight_NK, found, spread_KK, STORABLE.get(fit))
    integers_NK, scale_NG = found.number_NK.to(torch.int8), found.step_NG
    if found.offset_NG is None:
        return GroupedWeight(integers_NK, scale_NG.to(torch.bfloat16))
    return GroupedWeight(
        integers_NK, scale_NG.to(torch.float16), (found.offset_NG - OFFSET * scale_NG).to(torch.float16)
    )


def _storable_scale(
    scale_N: Tensor, best_N: Tensor, best_middle: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`compress.rounding.descent.Grids` of `group_scale`."""
    stored_N = best_N.to(torch.bfloat16).to(torch.float32)
    yield torch.where(stored_N >= torch.finfo(torch.bfloat16).tiny, stored_N, scale_N), torch.zeros_like(scale_N)


def _storable_range(
    scale_N: Tensor, best_N: Tensor, best_middle: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`compress.rounding.descent.Grids` of `group_range`, whose offset is 8 scales below the middle."""
    for new_N in (best_N.to(torch.float16).to(torch.float32).clamp(min=LEAST_SCALE), scale_N):
        offset_N = (best_middle(new_N) - OFFSET * new_N).to(torch.float16).to(torch.float32)
        yield new_N, offset_N + OFFSET * new_N


STORABLE: dict[Fit, Grids] = {group_scale: _storable_scale, group_range: _storable_range}


def _grouped(quantized_NK: Tensor, grids: list[Grid]) -> GroupedWeight:
    offsets = [grid.offset_N for grid in grids if grid.offset_N is not None]
    scale_NG = torch.stack([grid.scale_N for grid in grids], dim=1)
    return GroupedWeight(quantized_NK, scale_NG, torch.stack(offsets, dim=1) if offsets else None)


def _joined(grids: list[Grid]) -> Grid:
    offsets = [grid.offset_N for grid in grids if grid.offset_N is not None]
    return Grid(torch.cat([grid.scale_N for grid in grids]), torch.cat(offsets) if offsets else None)


def _widened(x_NG: Tensor, group: int) -> Tensor:
    return x_NG.to(torch.float32).repeat_interleave(group, dim=1)


def _rounded(steps: Tensor) -> Tensor:
    return steps.round_().clamp_(LOW, HIGH)
