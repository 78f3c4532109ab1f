"""INT8 weights whose rounding errors make up for each other on calibration activations (GPTQ,
https://arxiv.org/abs/2210.17323): a column is rounded, and its error moves into the columns that are still to come.

The Hessian is taken of the activations as the runtime rounds them. Scales stay those of rounding to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.compress.decoder.weights import QuantizedWeight, quantize_per_channel
from penjing.kernels.rounding import round_clamp_

DAMPING = 0.01  # of the mean of the diagonal; ten times as much as long as the matrix is not positive in float32
LARGEST = 1e12  # the sum of 3e14 squares of it is below 3.4e38, the largest of float32
COLUMNS = 128  # at a time: the columns behind them are corrected by one product


def error_spread(x_MK: Tensor) -> Tensor:
    """(K, K) upper triangular: row k says how the error of column k is made up for by the columns after it.

    The Cholesky factor of the inverse of XᵀX, damped. Channels that are never active ask for nothing. Activations above
    `LARGEST` are divided by a number first: the ratios in a row of the factor, which are all that counts, stay.

    Args:
        x_MK: (M, K) float32 finite activations; any M ≥ 1.
    """
    low, high = x_MK.aminmax()
    if (largest := max(-float(low), float(high))) > LARGEST:
        x_MK = x_MK * (LARGEST / largest)
    hessian_KK = x_MK.t() @ x_MK
    diagonal_K = hessian_KK.diagonal()
    diagonal_K += torch.where(diagonal_K == 0, 1.0, 0.0)
    added = DAMPING * float(diagonal_K.mean())
    while True:
        diagonal_K += added
        factor_KK, failed = torch.linalg.cholesky_ex(hessian_KK)
        if not failed:
            upper_KK, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor_KK), upper=True)
            if not failed:
                return upper_KK
        added *= 10


def quantize_compensated(weight_NK: Tensor, spread_KK: Tensor) -> QuantizedWeight:
    """Symmetric INT8 with the scales of `quantize_per_channel`.

    Args:
        weight_NK: (N, K) float32; it is not changed.
        spread_KK: of `error_spread`, for the activations that the weight reads.
    """
    scale_N1 = quantize_per_channel(weight_NK).scale_N1
    quantized_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    left_NK = weight_NK / scale_N1  # in units of the scale
    num_columns = weight_NK.shape[1]
    for begin in range(0, num_columns, COLUMNS):
        end = min(begin + COLUMNS, num_columns)
        block_BN, errors_BN = left_NK[:, begin:end].t().contiguous(), torch.empty(end - begin, weight_NK.shape[0])
        factors_BB = spread_KK[begin:end, begin:end]
        for place in range(end - begin):
            rounded_N = round_clamp_(block_BN[place].clone())
            errors_BN[place] = (block_BN[place] - rounded_N) / factors_BB[place, place]
            block_BN[place] = rounded_N
            block_BN[place + 1 :].addr_(factors_BB[place, place + 1 :], errors_BN[place], alpha=-1)
        quantized_NK[:, begin:end] = block_BN.t().to(torch.int8)
        left_NK[:, end:] -= errors_BN.t() @ spread_KK[begin:end, end:]
    return QuantizedWeight(quantized_NK, scale_N1)
