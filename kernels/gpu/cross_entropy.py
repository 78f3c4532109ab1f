"""The loss of rows of logits, and their gradient in place, in the Triton language: two reads and one write a logit."""
# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import DTYPES, NAMES

BLOCK, NUM_WARPS = 4096, 8  # 16 logits a thread


def takes(logits_NV: torch.Tensor) -> bool:
    """Whether the kernel can run: a float type, contiguous, at least one logit."""
    return logits_NV.dtype in DTYPES and logits_NV.is_contiguous() and logits_NV.numel() > 0


def loss_and_gradient_(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, ignored: int, smoothing: float, with_gradient: bool
) -> torch.Tensor:
    """See `kernels.cross_entropy`; a target outside the vocabulary gives NaN."""
    rows, columns = logits_NV.shape
    loss_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    loss_kernel[(rows,)](
        logits_NV,
        targets_N.contiguous(),
        loss_N,
        columns,
        ignored,
        smoothing,
        with_gradient,
        BLOCK,
        num_warps=NUM_WARPS,
    )
    return loss_N


def variants() -> Iterator[Variant]:
    """Every configuration that is launched."""
    for name in NAMES.values():
        for with_gradient in (False, True):
            yield Variant(
                label=f"{'loss and gradient' if with_gradient else 'loss'} {name}",
                kernel=loss_kernel,
                arguments={"logits": f"*{name}:16", "targets": "*i64:16", "loss": "*fp32:16"}
                | {"columns": "i32:16", "ignored": "i32", "smoothing": "fp32"},
                constants={"WITH_GRADIENT": with_gradient, "BLOCK": BLOCK},
                num_warps=NUM_WARPS,
                hot=True,
            )


@triton.jit
def loss_kernel(logits, targets, loss, columns, ignored, smoothing, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * columns
    lane = tl.arange(0, BLOCK)
    # A running maximum and sum for each lane; they meet after the loop.
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK,), dtype=tl.float32)
    plain = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        mask = start + lane < columns
        x = tl.load(logits + start + lane, mask=mask, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, x)
        # Lanes that have seen nothing stay at weight 0: −∞ − −∞ would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp(largest - shift) + tl.exp(x - shift)
        plain += tl.where(mask, x, 0.0)
        largest = higher
    top = tl.max(largest, axis=0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    normaliser = shift + tl.log(tl.sum(weight * tl.exp(largest - shift), axis=0))
    counted = target != ignored
    valid = (target >= 0) & (target < columns)
    wanted = tl.load(logits + target, mask=valid, other=float("nan")).to(tl.float32)
    wanted = (1.0 - smoothing) * wanted + smoothing * (tl.sum(plain, axis=0) / columns)
    tl.store(loss + row, tl.where(counted, normaliser - wanted, 0.0))
    if WITH_GRADIENT:
        # Reads of `wanted` above must be over before the row is overwritten.
        tl.debug_barrier()
        for start in range(0, columns, BLOCK):
            mask = start + lane < columns
            x = tl.load(logits + start + lane, mask=mask, other=0.0).to(tl.float32)
            gradient = tl.exp(x - normaliser) - smoothing / columns
            gradient -= tl.where(start + lane == target, 1.0 - smoothing, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(logits + start + lane, gradient.to(logits.dtype.element_ty), mask=mask)
