"""Storing keys and values in a paged cache, in INT8 where the cache is."""

from __future__ import annotations

import torch

from penjing.kernels.cpu.kv_layout import FLOAT16_MOST, check_cache, is_native
from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.quantize import quantize_per_token_torch


def write_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_T: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store the keys and values of T tokens in one layer's pages.

    An INT8 cache takes each token's head as `quantize_per_token` does: scale = amax / 127, half to even. In float16
    what lies beyond ±65504 becomes that.

    Args:
        k_TKD, v_TKD: (T, num_kv_heads, head_dim).
        k_cache, v_cache: (num_blocks, num_kv_heads, block_size, head_dim), floating or int8; written in place.
        slot_T: (T,) int64, block × block_size + offset; −1 skips the token. Slots of one call are distinct.
        k_scale, v_scale: (num_blocks, num_kv_heads, block_size) float32 of an INT8 cache, written in place.

    Raises:
        ValueError: a wrong shape or dtype, an INT8 cache without scales, or a slot outside the cache.
    """
    check_cache(k_cache, v_cache, k_scale, v_scale)
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    if k_TKD.shape != v_TKD.shape or k_TKD.shape != (slot_T.shape[0], num_kv_heads, head_dim):
        raise ValueError(
            f"k has shape {tuple(k_TKD.shape)}, v {tuple(v_TKD.shape)}; "
            f"({slot_T.shape[0]}, {num_kv_heads}, {head_dim}) is needed"
        )
    if not (k_TKD.is_floating_point() and v_TKD.is_floating_point()):
        raise ValueError(f"k is {k_TKD.dtype}, v {v_TKD.dtype}; floating tensors are needed")
    if slot_T.dtype != torch.int64:
        raise ValueError(f"slot_T is {slot_T.dtype}; int64 is needed")
    if slot_T.numel() == 0:
        return
    extension = cpu_extension(k_TKD, v_TKD, k_cache, slot_T)
    if extension is not None and k_TKD.dtype == v_TKD.dtype == torch.float32 and is_native(k_cache):
        k_TKD, v_TKD = k_TKD.detach().contiguous(), v_TKD.detach().contiguous()
        extension.write_kv(k_TKD, v_TKD, k_cache, v_cache, slot_T.contiguous(), k_scale, v_scale)
        return
    low, high = (int(value) for value in torch.aminmax(slot_T))
    if low < -1 or high >= num_blocks * block_size:
        raise ValueError(f"slots {low} … {high} are outside the cache of {num_blocks} blocks × {block_size}")
    if low < 0:
        kept = slot_T >= 0
        slot_T, k_TKD, v_TKD = slot_T[kept], k_TKD[kept], v_TKD[kept]
    block_T, offset_T = slot_T // block_size, slot_T % block_size
    for x_TKD, cache, scale in ((k_TKD, k_cache, k_scale), (v_TKD, v_cache, v_scale)):
        if scale is None:
            if cache.dtype == torch.float16:
                x_TKD = x_TKD.clamp(-FLOAT16_MOST, FLOAT16_MOST)
            cache[block_T, :, offset_T] = x_TKD.to(cache.dtype)
        elif len(x_TKD):
            q, factor = quantize_per_token_torch(x_TKD.flatten(0, 1))
            cache[block_T, :, offset_T] = q.view(x_TKD.shape)
            scale[block_T, :, offset_T] = factor.view(x_TKD.shape[:2])
