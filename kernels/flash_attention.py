"""Exact attention without the T × S matrix (FlashAttention: Dao, https://arxiv.org/abs/2307.08691), for training.

Grouped heads, causal and sliding-window masks, batches of one length or many sequences packed without padding; with
gradients. `kernels.paged_attention` is the operation for serving.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penjing.kernels.dispatch import autocast_together, gpu_kernels
from penjing.kernels.gpu.registry import MAX_HEAD_DIM

GPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ROWS = 512  # of a mask; 512 × 16 384 is 8 MB
MAX_GRID = 65_535  # heads or sequences of one launch


def flash_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q kᵀ × scale) v for B sequences of T queries and S keys; differentiable.

    The last query stands at the last key: query t is at position t + S − T. A causal row sees the keys up to its
    position, with a window the last `window` of them, itself included. A row that sees no key gives zeros.

    Within `torch.autocast` the inputs are cast as those of torch's own attention. On CUDA the Triton language computes
    it in float16, bfloat16 or float32 for head sizes that are multiples of 8 up to 256; elsewhere, and for other dtypes
    and head sizes, torch does.

    Args:
        q_BTHD: (batch, T, num_heads, head_dim) floating.
        k_BSGD, v_BSGD: (batch, S, num_kv_heads, head_dim), of q's dtype; num_heads is a multiple of num_kv_heads.
        window: keys a row sees at most; needs `causal`.
        scale: factor of the scores, > 0; head_dim ** −0.5 when None.

    Returns:
        (batch, T, num_heads, head_dim), dtype of q.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    q_BTHD, k_BSGD, v_BSGD = autocast_together(q_BTHD, k_BSGD, v_BSGD)
    _check(q_BTHD, k_BSGD, v_BSGD, 4, causal, window, scale)
    if q_BTHD.shape[0] != k_BSGD.shape[0]:
        raise ValueError(f"q has batch {q_BTHD.shape[0]}, k {k_BSGD.shape[0]}; they must be equal")
    factor = q_BTHD.shape[3] ** -0.5 if scale is None else scale
    if not _on_gpu(q_BTHD, k_BSGD, v_BSGD, num_sequences=q_BTHD.shape[0]):
        return flash_attention_torch(q_BTHD, k_BSGD, v_BSGD, causal=causal, window=window, scale=factor)
    lengths = None, None, q_BTHD.shape[1], k_BSGD.shape[1]
    return _Attention.apply(*_unit_stride(q_BTHD, k_BSGD, v_BSGD), *lengths, causal, window or 0, factor)


def flash_attention_packed(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    cu_query_N1: Tensor,
    cu_key_N1: Tensor,
    max_query: int,
    max_key: int,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`flash_attention` of N sequences laid end to end; each attends to itself alone. Lengths may be 0.

    Args:
        q_THD: (T, num_heads, head_dim); sequence n owns rows cu_query[n] : cu_query[n + 1].
        k_SGD, v_SGD: (S, num_kv_heads, head_dim), likewise.
        cu_query_N1, cu_key_N1: (N + 1,) int32 on q's device, rising from 0 to T and to S. On a GPU their values are
            not read by the host, so that nothing waits for the device: they must be right.
        max_query, max_key: at least the longest sequence's length.

    Returns:
        (T, num_heads, head_dim), dtype of q.

    Raises:
        ValueError: shapes, dtypes or options that do not fit; on a CPU also lengths that do not.
    """
    q_THD, k_SGD, v_SGD = autocast_together(q_THD, k_SGD, v_SGD)
    _check(q_THD, k_SGD, v_SGD, 3, causal, window, scale)
    for name, lengths in (("cu_query", cu_query_N1), ("cu_key", cu_key_N1)):
        if lengths.dtype != torch.int32 or lengths.dim() != 1 or lengths.shape != cu_query_N1.shape or not len(lengths):
            raise ValueError(f"{name} has shape {tuple(lengths.shape)} and {lengths.dtype}; int32 (N + 1,) is needed")
        if lengths.device != q_THD.device:
            raise ValueError(f"{name} is on {lengths.device}, q on {q_THD.device}; they must be on one device")
    if q_THD.device.type == "cpu":
        _check_lengths("cu_query", cu_query_N1, q_THD.shape[0], "max_query", max_query)
        _check_lengths("cu_key", cu_key_N1, k_SGD.shape[0], "max_key", max_key)
    factor = q_THD.shape[2] ** -0.5 if scale is None else scale
    if _on_gpu(q_THD, k_SGD, v_SGD, num_sequences=len(cu_query_N1) - 1):
        q, k, v = _unit_stride(q_THD[None], k_SGD[None], v_SGD[None])
        lengths = cu_query_N1.contiguous(), cu_key_N1.contiguous(), max_query, max_key
        return _Attention.apply(q, k, v, *lengths, causal, window or 0, factor)[0]
    out = [
        flash_attention_torch(q[None], k[None], v[None], causal=causal, window=window, scale=factor)[0]
        for (q_begin, q_end), (k_begin, k_end) in zip(
            pairwise(cu_query_N1.tolist()), pairwise(cu_key_N1.tolist()), strict=True
        )
        for q, k, v in [(q_THD[q_begin:q_end], k_SGD[k_begin:k_end], v_SGD[k_begin:k_end])]
    ]
    return torch.cat(out) if out else torch.empty_like(q_THD)


def flash_attention_torch(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *, causal: bool, window: int | None, scale: float
) -> Tensor:
    """The reference of `flash_attention`, by `torch.nn.functional.scaled_dot_product_attention`; differentiable."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGD))
    num_queries, num_keys = q.shape[2], k.shape[2]
    if q.numel() == 0 or num_keys == 0:
        return torch.zeros_like(q_BTHD)
    if not causal or (num_queries == num_keys and (window is None or window >= num_keys)):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    elif num_queries <= _ROWS:
        out = _masked(q, k, v, num_keys - num_queries, window, scale)
    else:  # rows at a time, whose masks are made again for the gradients: no mask of all rows is ever held
        blocks = []
        for begin in range(0, num_queries, _ROWS):
            end = min(begin + _ROWS, num_queries)
            last = max(end + num_keys - num_queries, 0)
            first = 0 if window is None else min(max(begin + num_keys - num_queries - window + 1, 0), last)
            rows = q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last]
            offset = begin + num_keys - num_queries - first
            blocks.append(checkpoint(_masked, *rows, offset, window, scale, use_reentrant=False))
        out = torch.cat(blocks, 2)
    return out.transpose(1, 2)


def _masked(q: Tensor, k: Tensor, v: Tensor, offset: int, window: int | None, scale: float) -> Tensor:
    """(B, H, T, D): causal attention of queries the first of which stands at key `offset`."""
    if not k.shape[2]:
        return torch.zeros_like(q)
    position_T1 = torch.arange(offset, offset + q.shape[2], device=q.device)[:, None]
    key_S = torch.arange(k.shape[2], device=q.device)
    mask = key_S <= position_T1
    if window is not None:
        mask &= key_S > position_T1 - window
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out if offset >= 0 else out.masked_fill(~mask.any(1, keepdim=True), 0.0)


class _Attention(torch.autograd.Function):
    """The Triton-language kernels, with the row statistics that the backward pass needs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_query: Tensor | None,
        cu_key: Tensor | None,
        max_query: int,
        max_key: int,
        causal: bool,
        window: int,
        scale: float,
    ) -> Tensor:
        from penjing.kernels.gpu.flash_attention import flash_attention_forward

        out, lse = flash_attention_forward(q, k, v, cu_query, cu_key, max_query, max_key, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_query, cu_key)
        ctx.options = max_query, max_key, causal, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from penjing.kernels.gpu.flash_attention_backward import flash_attention_backward

        (grad_out,) = grads
        return (*flash_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), *(None,) * 7)


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, num_sequences: int) -> bool:
    fits = q.dtype in GPU_DTYPES and q.shape[-1] <= MAX_HEAD_DIM and q.shape[-1] % 8 == 0
    fits = fits and max(q.shape[-2], num_sequences) <= MAX_GRID
    return fits and gpu_kernels("flash_attention", q, k, v) is not None


def _unit_stride(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _check(q: Tensor, k: Tensor, v: Tensor, dims: int, causal: bool, window: int | None, scale: float | None) -> None:
    if q.dim() != dims or k.dim() != dims or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        form = "(batch, T, heads, head_dim)" if dims == 4 else "(T, heads, head_dim)"
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; {form} with one head_dim is needed"
        )
    if not q.shape[-1] or not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{q.shape[-2]} query heads and {k.shape[-2]} key heads; the first must be a multiple")
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; one floating dtype is needed")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q is on {q.device}, k on {k.device}, v on {v.device}; one device is needed")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} with causal={causal}; a window is at least 1 and needs causal=True")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale={scale}; a positive factor is needed")


def _check_lengths(name: str, cumulative: Tensor, total: int, max_name: str, longest: int) -> None:
    values = cumulative.tolist()
    lengths = [end - begin for begin, end in pairwise(values)]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} is {values}; it must rise from 0 to {total}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"{max_name}={longest} is below the longest sequence's {max(lengths)}")
