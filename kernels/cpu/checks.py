"""Checks of tensors before their addresses go to the compiled kernels, and the structures that describe them."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.kernels.cpu.key_blocks import KeyBlocks
from penjing.kernels.cpu.kv_layout import check_cache, page_dtype
from penjing.kernels.cpu.library import DTYPES, TURNED_KEYS, Linear, Pages, Selection, Sequences


def float_linear(weight_NK: Tensor, bias_N: Tensor | None) -> Linear:
    """Describe a float layer whose weight is read in place; the tensors must outlive the description."""
    name = str(weight_NK.dtype).removeprefix("torch.")
    if name not in DTYPES or weight_NK.dtype == torch.int8:
        raise ValueError(f"weight_NK is {weight_NK.dtype}; float32, bfloat16 or float16 is needed")
    check("weight_NK", weight_NK, weight_NK.dtype, (None, None))
    if 0 in weight_NK.shape:
        raise ValueError(f"weight_NK has shape {tuple(weight_NK.shape)}; non-empty (N, K) is needed")
    if bias_N is not None:
        check("bias_N", bias_N, torch.float32, (weight_NK.shape[0],))
    return Linear(
        weight=weight_NK.data_ptr(),
        bias=None if bias_N is None else bias_N.data_ptr(),
        n=weight_NK.shape[0],
        k=weight_NK.shape[1],
        dtype=DTYPES[name],
    )


def check_slots(slot_T: Tensor, num_slots: int) -> None:
    """Raise ValueError unless every slot is −1 or inside the cache."""
    if slot_T.numel():
        low, high = (int(value) for value in torch.aminmax(slot_T))
        if low < -1 or high >= num_slots:
            raise ValueError(f"slots {low} … {high} are outside the cache of {num_slots}")


def check_sequences(
    cu_query_S1: Tensor, context_len_S: Tensor, block_table_SB: Tensor, num_rows: int, block_size: int
) -> Sequences:
    """Describe the sequences of a call; raises ValueError for lengths that do not fit together."""
    check("context_len_S", context_len_S, torch.int32, (None,))
    num_sequences = context_len_S.shape[0]
    check("cu_query_S1", cu_query_S1, torch.int32, (num_sequences + 1,))
    check("block_table_SB", block_table_SB, torch.int32, (num_sequences, None))
    cu_query, context_len = cu_query_S1.tolist(), context_len_S.tolist()
    if cu_query[0] != 0 or cu_query[-1] != num_rows:
        raise ValueError(f"cu_query_S1 goes from {cu_query[0]} to {cu_query[-1]}; 0 to {num_rows} is needed")
    room = block_table_SB.shape[1] * block_size
    for sequence, length in enumerate(context_len):
        queries = cu_query[sequence + 1] - cu_query[sequence]
        if not 0 <= queries <= length or length > room or length == 0:
            raise ValueError(
                f"sequence {sequence} has {queries} queries and {length} keys; its blocks hold {room}, "
                "and queries ≤ keys with at least 1 key is needed"
            )
    return Sequences(
        cu_query_S1.data_ptr(),
        context_len_S.data_ptr(),
        block_table_SB.data_ptr(),
        block_table_SB.shape[1],
        num_sequences,
    )


def add_key_blocks(pages: Pages, blocks: KeyBlocks, summary: Tensor, summary_scale: Tensor) -> Selection:
    """Add the summaries of one layer to `pages`; raises ValueError for shapes or dtypes that do not fit together."""
    blocks.check(pages.block_size)
    shape = blocks.summary_shape(pages.num_blocks, pages.num_kv_heads, pages.block_size, pages.head_dim)
    check("summary", summary, torch.int8, shape)
    check("summary_scale", summary_scale, torch.float32, shape[:-1])
    pages.summary, pages.summary_scale = summary.data_ptr(), summary_scale.data_ptr()
    return Selection(blocks.block, blocks.sink, blocks.window, blocks.budget)


def raise_for(result: int, num_blocks: int) -> None:
    """Turn the library's negative results into exceptions."""
    if result == -1:
        raise MemoryError("no memory for the working buffers of the step")
    if result == -2:
        raise ValueError(f"the block table holds an id outside the cache of {num_blocks} blocks")
    if result == -9:
        raise ValueError("rows that choose blocks of keys have no window besides")


def pages_of(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, turned: bool = False
) -> Pages:
    """Describe one layer's pages; raises ValueError for shapes or dtypes that do not fit together."""
    check_cache(k_cache, v_cache, k_scale, v_scale)
    dtype = page_dtype(k_cache, k_scale)
    check("k_cache", k_cache, dtype, (None, None, None, None))
    check("v_cache", v_cache, dtype, tuple(k_cache.shape))
    if 0 in k_cache.shape:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}; no dimension may be 0")
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    scales = [None if scale is None else scale.data_ptr() for scale in (k_scale, v_scale)]
    pages = Pages(k_cache.data_ptr(), v_cache.data_ptr(), *scales, num_blocks, block_size, num_kv_heads, head_dim)
    pages.dtype = DTYPES[str(dtype).removeprefix("torch.")]
    if turned and block_size % TURNED_KEYS:
        raise ValueError(f"pages of {block_size} keys cannot be turned; a multiple of {TURNED_KEYS} is needed")
    pages.turned = turned
    return pages


def rows(name: str, x_MK: Tensor, columns: int | None) -> Tensor:
    """`x_MK` as contiguous float32; raises ValueError unless it is floating (M, K ≥ 1) on the CPU."""
    if x_MK.dim() != 2 or x_MK.shape[1] == 0 or columns not in (None, x_MK.shape[1]) or not x_MK.is_floating_point():
        wanted = "K ≥ 1" if columns is None else str(columns)
        raise ValueError(f"{name} has shape {tuple(x_MK.shape)} and {x_MK.dtype}; floating (M, {wanted}) is needed")
    if x_MK.device.type != "cpu":
        raise ValueError(f"{name} is on {x_MK.device}; a CPU tensor is needed")
    return x_MK.detach().to(torch.float32).contiguous()


def check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `tensor` is a contiguous CPU tensor of `dtype` and `shape`; None: any size."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()} on {tensor.device}; "
            f"contiguous {dtype} ({wanted}) on the CPU is needed"
        )
