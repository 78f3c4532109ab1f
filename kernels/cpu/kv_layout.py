"""One layer's paged key-value cache: its layout and the checks of its tensors.

Keys and values lie in pages of (num_blocks, num_kv_heads, block_size, head_dim) each. In INT8 every token of every head
has a float32 scale besides, in arrays of their own: (num_blocks, num_kv_heads, block_size), so that rows stay aligned
and a block's scales share cache lines. A token's bytes depend on that token alone.

In the memory of the decoder's own step (`kernels.decoder_step`) the keys of a page lie by dimension, sixteen keys at a
time, as the products with queries read them; see `library.Pages`. What else reads a pool reads it by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Sums of 32767 × 127 over more dimensions than this leave 32 bits; dimensions are read four at a time.
INT8_MAX_HEAD_DIM, INT8_HEAD_DIM_MULTIPLE = 512, 4
NATIVE = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
TILED_DIMENSIONS = 32  # a product of AMX's tiles takes so many
FLOAT16_MOST = 65504.0  # what lies beyond is stored as this


@dataclass(frozen=True)
class LayerCache:
    """The checked tensors of one layer; the scales are None unless the pages are INT8."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def gather(self, row_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (N, head_dim) in float32; row_N: (block × num_kv_heads + head) × block_size + offset."""
        return _gather(self.k, self.k_scale, row_N), _gather(self.v, self.v_scale, row_N)


def _gather(pages: torch.Tensor, scale: torch.Tensor | None, row_N: torch.Tensor) -> torch.Tensor:
    rows = pages.view(-1, pages.shape[3]).index_select(0, row_N).to(torch.float32)
    return rows if scale is None else rows * scale.view(-1).index_select(0, row_N)[:, None]


def is_native(cache: torch.Tensor) -> bool:
    """The C++ kernels read and write pages of this dtype."""
    return cache.dtype in NATIVE and cache.numel() > 0


def page_dtype(pages: torch.Tensor, scale: torch.Tensor | None) -> torch.dtype:
    """What the C++ kernels want `pages` to be, given their scales; raises ValueError where int8 has none."""
    if scale is None and pages.dtype == torch.int8:
        raise ValueError("an INT8 pool needs kv_scale")
    if scale is not None:
        return torch.int8
    return pages.dtype if pages.dtype in (torch.float16, torch.bfloat16) else torch.float32


def narrow_dtype(isa: str | None, head_dim: int) -> torch.dtype:
    """The faster 16 bits for pages: bfloat16 where many rows attend to them by tiles of AMX.

    Args:
        isa: of the extension; None where there is none.
    """
    return torch.bfloat16 if isa == "amx" and head_dim % TILED_DIMENSIONS == 0 else torch.float16


def check_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> None:
    """Raise ValueError unless the tensors are one layer's cache."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} {k_cache.dtype}, v_cache {tuple(v_cache.shape)} {v_cache.dtype}; "
            "both must be (num_blocks, num_kv_heads, block_size, head_dim) of one dtype"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if k_cache.dtype != torch.int8:
        if not k_cache.is_floating_point():
            raise ValueError(f"k_cache is {k_cache.dtype}; a floating type, or int8 with scales, is needed")
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"k_scale and v_scale belong to an int8 cache; this one is {k_cache.dtype}")
        return
    check_int8_head_dim(k_cache.shape[3])
    shape = k_cache.shape[:3]
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            raise ValueError(f"an int8 cache without {name}; float32 {tuple(shape)} is needed")
        if scale.shape != shape or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(scale.shape)}, {scale.dtype}, strides {scale.stride()}; "
                f"contiguous float32 {tuple(shape)} is needed"
            )
        if scale.device != k_cache.device:
            raise ValueError(f"{name} is on {scale.device}, the cache on {k_cache.device}")


def check_int8_head_dim(head_dim: int) -> None:
    """Raise ValueError unless an INT8 cache can hold heads of this size."""
    if head_dim > INT8_MAX_HEAD_DIM or head_dim % INT8_HEAD_DIM_MULTIPLE:
        raise ValueError(
            f"an INT8 cache with head_dim={head_dim}; a multiple of {INT8_HEAD_DIM_MULTIPLE}, at most "
            f"{INT8_MAX_HEAD_DIM}, is needed: use a float32 cache"
        )
