"""Hadamard transform of blocks of channels: what one channel holds is spread over its block, none stands out.

Rounded to INT8 with one scale a token, inputs with outliers such as those of a gated MLP's last product lose most of
their error by it (QuaRot, https://arxiv.org/abs/2404.00456). The matrix is Sylvester's: H(2n) = [H H; H −H], over √n;
symmetric and orthogonal, so it is its own inverse.
"""

from __future__ import annotations

import math

import torch

from penjing.kernels.dispatch import cpu_extension

MAX_BLOCK = 256


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """y = x · H in each block of `block` columns of the last dimension.

    Sums run in one order everywhere, so a row's bits do not depend on its neighbours or on what computes them.

    Args:
        x: (…, K) floating.
        block: a power of two from 2 to 256 that divides K.

    Returns:
        (…, K) float32; differentiable.

    Raises:
        ValueError: a wrong block or dtype.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x has shape {tuple(x.shape)} and {x.dtype}; floating (…, K) is needed")
    check_block(block, x.shape[-1])
    extension = cpu_extension(x)
    if extension is None or x.numel() == 0:
        return hadamard_torch(x, block)
    rows_MK = x.detach().to(torch.float32).reshape(-1, x.shape[-1]).contiguous()
    return extension.hadamard(rows_MK, block).view(x.shape)


def check_block(block: int, columns: int) -> None:
    """Raise ValueError unless `columns` can be transformed in blocks of `block`."""
    if not 2 <= block <= MAX_BLOCK or block & (block - 1) or columns % block:
        raise ValueError(
            f"block={block}: a power of two from 2 to {MAX_BLOCK} that divides {columns} columns is needed"
        )


def hadamard_torch(x: torch.Tensor, block: int) -> torch.Tensor:
    """The reference of `hadamard`: log2(block) stages of sums and differences."""
    y = x.to(torch.float32).reshape(-1, block)
    half = block // 2
    while half:
        a, b = y.view(-1, 2, half).unbind(1)
        y = torch.stack((a + b, a - b), dim=1)
        half //= 2
    return (y * (1 / math.sqrt(block))).view(x.shape)
