"""4-bit weights in groups of inputs, each with the scale that loses least, rounded to nearest or compensated (GPTQ).

A group's scale is looked for among the largest magnitude over 7 and smaller ones, which clip: the one with the least
squared error, weighted by how much an error of each input counts. The best one is refined once by least squares. Scales
are stored in bfloat16, which holds the range of float32, and weights are rounded with the scale as it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.kernels.int4_linear import pack_int4

LOW, HIGH = -8, 7
# Of the largest magnitude of a group: 1 / 7 reaches it exactly, 1 / 12 clips everything beyond 0.58 of it.
RATIOS = tuple(1 / (7 + step / 4) for step in range(21))
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class GroupedWeight:
    """weight ≈ weight_NK × scale_NG, each scale for K / G inputs: int8 in [−8, 7] and bfloat16."""

    weight_NK: Tensor  # noqa: N815
    scale_NG: Tensor  # noqa: N815

    def dequantize(self) -> Tensor:
        """(N, K) float32."""
        group = self.weight_NK.shape[1] // self.scale_NG.shape[1]
        return self.weight_NK.to(torch.float32) * self.scale_NG.to(torch.float32).repeat_interleave(group, dim=1)

    def packed(self) -> Tensor:
        """(N, K / 8) int32, see `kernels.int4_linear`."""
        return pack_int4(self.weight_NK)


def group_scale(weight_NK: Tensor, importance_K: Tensor) -> Tensor:
    """(N,) bfloat16: of each row of the group `weight_NK` the scale that loses least; 1 for a row of zeros.

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
        error_NK = weight_NK - _rounded(weight_NK, stored_N[:, None]) * stored_N[:, None]
        lost_N = error_NK.square_() @ importance_K
        better_N = lost_N < least_N
        best_N[better_N], least_N[better_N] = stored_N[better_N], lost_N[better_N]

    for ratio in RATIOS:
        consider(largest_N * ratio)
    integers_NK = _rounded(weight_NK, best_N[:, None])
    square_N = integers_NK.square() @ importance_K
    consider((weight_NK * integers_NK) @ importance_K / square_N.clamp(min=torch.finfo(torch.float32).tiny))
    return best_N.to(torch.bfloat16)


def quantize_grouped(weight_NK: Tensor, group: int, importance_K: Tensor) -> GroupedWeight:
    """Round to nearest.

    Args:
        weight_NK: (N, K) float32.
        group: inputs that share a scale; it divides K.
        importance_K: (K,) mean square of each input.
    """
    importance_K = importance_K.clamp(min=float(importance_K.mean()) * 1e-6 + torch.finfo(torch.float32).tiny)
    scales = [
        torch.cat([group_scale(rows, part_K) for rows in part_NK.split(ROWS_AT_ONCE)])
        for part_NK, part_K in zip(weight_NK.split(group, dim=1), importance_K.split(group), strict=True)
    ]
    scale_NG = torch.stack(scales, dim=1)
    wide_NK = scale_NG.to(torch.float32).repeat_interleave(group, dim=1)
    return GroupedWeight(_rounded(weight_NK, wide_NK).to(torch.int8), scale_NG)


def quantize_grouped_compensated(weight_NK: Tensor, group: int, spread_KK: Tensor) -> GroupedWeight:
    """Round column by column, the errors made up for by the columns that follow; a group's scales are found when it is
    reached, of what its weights have become by then.

    Args:
        weight_NK: (N, K) float32; it is not changed.
        group: inputs that share a scale; it divides K.
        spread_KK: of `compensate.error_spread`, for the activations that the weight reads.
    """
    num_rows, num_columns = weight_NK.shape
    # The error that is left of a column when those behind it have made up for what they can.
    importance_K = spread_KK.diagonal().square().reciprocal()
    left_NK = weight_NK.clone()
    quantized_NK, scales = torch.empty(weight_NK.shape, dtype=torch.int8), []
    for begin in range(0, num_columns, group):
        end = begin + group
        scales.append(group_scale(left_NK[:, begin:end], importance_K[begin:end]))
        scale_N = scales[-1].to(torch.float32)
        block_BN, errors_BN = left_NK[:, begin:end].t().contiguous(), torch.empty(group, num_rows)
        factors_BB = spread_KK[begin:end, begin:end]
        for place in range(group):
            rounded_N = _rounded(block_BN[place], scale_N)
            quantized_NK[:, begin + place] = rounded_N.to(torch.int8)
            errors_BN[place] = (block_BN[place] - rounded_N * scale_N) / factors_BB[place, place]
            block_BN[place + 1 :].addr_(factors_BB[place, place + 1 :], errors_BN[place], alpha=-1)
        left_NK[:, end:] -= errors_BN.t() @ spread_KK[begin:end, end:]
    return GroupedWeight(quantized_NK, torch.stack(scales, dim=1))


def _rounded(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).round_().clamp_(LOW, HIGH)
