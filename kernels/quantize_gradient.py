"""8-bit gradients for communication: stochastic rounding with a scale a chunk (QSGD, https://arxiv.org/abs/1610.02132).

A packed gradient is one byte tensor: the codes of all chunks, then their float32 scales. Rounding up or down is drawn
with the probability that makes the result right on average, from a counter-based generator: element i under a seed
always draws the same number, on any device.
"""

from __future__ import annotations

import torch

from penjing.kernels.dispatch import gpu_kernels
from penjing.kernels.rounding import INT8_LIMIT, divided

CHUNK = 2048
_MASK = 0xFFFFFFFF


def packed_size(num_values: int, chunk: int = CHUNK) -> int:
    """Bytes of `num_values` packed values: a code each, padded to whole chunks, and four bytes a chunk."""
    return -(-num_values // chunk) * (chunk + 4)


def quantize_gradient(gradient: torch.Tensor, seed: int, chunk: int = CHUNK) -> torch.Tensor:
    """Pack a gradient into bytes: scale = amax / 127 of a chunk, code = floor(x / scale + u), u uniform in [0, 1).

    The mean over seeds of what `dequantize_gradient` returns is the gradient. A chunk that holds inf or NaN comes back
    as NaN.

    Args:
        gradient: any shape, floating; read in memory order of its contiguous form.
        seed: of the random numbers, 0 … 2³² − 1; another one for every step and process.
        chunk: values that share a scale, a power of two, 16 … 16 384.

    Returns:
        (packed_size(numel, chunk),) uint8.

    Raises:
        ValueError: not floating, or a chunk or seed out of range.
    """
    _check(chunk)
    if not gradient.is_floating_point():
        raise ValueError(f"the gradient is {gradient.dtype}; a floating tensor is needed")
    if not 0 <= seed <= _MASK:
        raise ValueError(f"seed={seed}: it must be in [0, 2³²)")
    gpu = gpu_kernels("quantize_gradient", gradient)
    if gpu is not None and gpu.takes(gradient):
        return gpu.quantize_gradient(gradient, seed, chunk)
    return quantize_gradient_torch(gradient, seed, chunk)


def dequantize_gradient(packed: torch.Tensor, num_values: int, chunk: int = CHUNK) -> torch.Tensor:
    """The mean of the gradients packed in each row.

    Args:
        packed: (packed_size,) or (W, packed_size) uint8, one row a process.
        num_values: of one gradient.
        chunk: as it was packed.

    Returns:
        (num_values,) float32.

    Raises:
        ValueError: a wrong shape, dtype or chunk.
    """
    _check(chunk)
    size = packed_size(num_values, chunk)
    fitting = packed.dtype == torch.uint8 and packed.dim() in (1, 2) and packed.shape[-1] == size
    if not fitting or len(packed) == 0 < size:
        raise ValueError(
            f"packed is {tuple(packed.shape)} {packed.dtype}; uint8 ({size},) or (W ≥ 1, {size}) is needed for "
            f"{num_values} values in chunks of {chunk}"
        )
    packed_WB = (packed[None] if packed.dim() == 1 else packed).contiguous()
    gpu = gpu_kernels("quantize_gradient", packed)
    if gpu is not None and num_values > 0:
        return gpu.dequantize_gradient(packed_WB, num_values, chunk)
    return dequantize_gradient_torch(packed_WB, num_values, chunk)


def quantize_gradient_torch(gradient: torch.Tensor, seed: int, chunk: int) -> torch.Tensor:
    """The reference of `quantize_gradient`."""
    values = gradient.detach().reshape(-1).to(torch.float32)
    num_chunks = -(-values.numel() // chunk)
    values = torch.nn.functional.pad(values, (0, num_chunks * chunk - values.numel())).view(num_chunks, chunk)
    scale_C = divided(values.abs().amax(1), INT8_LIMIT) if num_chunks else values.new_zeros(0)
    scale_C = torch.where(scale_C == 0, 1.0, scale_C)
    scale_C = torch.where(scale_C.isfinite(), scale_C, torch.nan)
    counter = torch.arange(num_chunks * chunk, device=values.device).view(num_chunks, chunk)
    up = uniform(counter, seed)
    codes = torch.floor(values / scale_C[:, None] + up).clamp_(-INT8_LIMIT, INT8_LIMIT).nan_to_num_(0.0)
    return torch.cat((codes.to(torch.int8).view(torch.uint8).flatten(), scale_C.view(torch.uint8).flatten()))


def dequantize_gradient_torch(packed_WB: torch.Tensor, num_values: int, chunk: int) -> torch.Tensor:
    """The reference of `dequantize_gradient`."""
    num_chunks = -(-num_values // chunk)
    total = torch.zeros(num_chunks, chunk, dtype=torch.float32, device=packed_WB.device)
    for row in packed_WB:
        codes = row[: num_chunks * chunk].view(torch.int8).view(num_chunks, chunk)
        # A copy: views as float32 must start at a multiple of four bytes of the storage.
        scale_C = row[num_chunks * chunk :].clone().view(torch.float32)
        total += codes * scale_C[:, None]
    return divided(total, len(packed_WB)).flatten()[:num_values]


def uniform(counter: torch.Tensor, seed: int) -> torch.Tensor:
    """A float32 in [0, 1) with 24 random bits for each int64 counter: a 32-bit integer hash (lowbias32 by C. Wellons,
    https://github.com/skeeto/hash-prospector) of counter and seed."""
    x = _hash(counter ^ (counter >> 32) * 0x9E3779B9 & _MASK)
    x = _hash(x ^ _hash(torch.tensor(seed, device=counter.device)))
    return (x >> 8).to(torch.float32) * 2.0**-24


def _hash(x: torch.Tensor) -> torch.Tensor:
    x = x & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & _MASK  # a product may wrap at 64 bits; its lower half is right
    return x ^ (x >> 16)


def _check(chunk: int) -> None:
    if not 16 <= chunk <= 16384 or chunk & (chunk - 1):
        raise ValueError(f"chunk={chunk}: a power of two in 16 … 16384 is needed")
