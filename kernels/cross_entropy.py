"""Cross-entropy of a linear layer whose logits never exist all at once.

A chunk of rows at a time is multiplied with the weight, turned into its loss and, in place, into the gradient of its
logits, and multiplied back: memory for one chunk instead of rows × vocabulary, and no more products than the usual way,
since the gradients are made in the forward pass (Hsu et al., Liger kernel, https://arxiv.org/abs/2410.10989).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from penjing.kernels.dispatch import gpu_kernels

IGNORED = -100
# Logits of a chunk: few enough to stay small beside the model, enough rows to keep the products efficient.
_CHUNK = {"cpu": 1 << 23}
_LARGE_CHUNK = 1 << 27
_ROW_MULTIPLE = 128


def linear_cross_entropy(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    ignored: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Sum over rows of the cross-entropy of `hidden · weightᵀ` against `targets`; log-softmax in float32.

    Under autocast the product runs in its type. The gradient of the weight is summed in float32.

    Args:
        hidden_NE: (N, E) floating.
        weight_VE: (V, E) floating.
        targets_N: (N,) int64 in [0, V), or `ignored`, which counts for nothing.
        label_smoothing: share of the target's probability spread over all classes, [0, 1).

    Returns:
        A float32 scalar, differentiable once.

    Raises:
        ValueError: shapes, types or a label_smoothing that do not fit.
        RuntimeError: a target outside [0, V) on a CPU; on a GPU the result is NaN.
    """
    if hidden_NE.dim() != 2 or weight_VE.dim() != 2 or hidden_NE.shape[1] != weight_VE.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_NE.shape)} and weight {tuple(weight_VE.shape)} are not (N, E) and (V, E)"
        )
    if targets_N.shape != hidden_NE.shape[:1] or targets_N.dtype != torch.int64:
        raise ValueError(f"targets has shape {tuple(targets_N.shape)} and {targets_N.dtype}; ({len(hidden_NE)},) int64")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: it must be in [0, 1)")
    device = hidden_NE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NE.dtype
    hidden_NE, weight_VE = hidden_NE.to(dtype), weight_VE.to(dtype)
    return _LinearCrossEntropy.apply(hidden_NE, weight_VE, targets_N, ignored, label_smoothing)  # pyright: ignore[reportReturnType]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignored: int, smoothing: float
    ) -> torch.Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        with torch.autocast(hidden.device.type, enabled=False):
            total = torch.zeros((), dtype=torch.float64, device=hidden.device)
            hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
            for rows in _chunks(hidden, len(weight)):
                logits = hidden[rows] @ weight.t()
                loss = loss_and_gradient_(logits, targets[rows], ignored, smoothing, wants_hidden or wants_weight)
                total += loss.sum(dtype=torch.float64)
                if hidden_gradient is not None:
                    torch.mm(logits, weight, out=hidden_gradient[rows])
                if weight_gradient is not None:
                    weight_gradient += logits.t() @ hidden[rows]
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total.to(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = [
            None if saved is None else (saved * gradients[0]).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None


def loss_and_gradient_(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, ignored: int, smoothing: float, with_gradient: bool
) -> torch.Tensor:
    """The loss of each row, (N,) float32; `logits_NV` becomes the gradient of their sum `with_gradient`."""
    gpu = gpu_kernels("cross_entropy", logits_NV, targets_N)
    if gpu is not None and gpu.takes(logits_NV):
        return gpu.loss_and_gradient_(logits_NV, targets_N, ignored, smoothing, with_gradient)
    return loss_and_gradient_torch_(logits_NV, targets_N, ignored, smoothing, with_gradient)


def loss_and_gradient_torch_(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, ignored: int, smoothing: float, with_gradient: bool
) -> torch.Tensor:
    """The reference of `loss_and_gradient_`."""
    counted = targets_N != ignored
    index = torch.where(counted, targets_N, 0)[:, None]
    wide = logits_NV.to(torch.float32)
    normaliser = torch.logsumexp(wide, -1)
    wanted = wide.gather(1, index)[:, 0]
    if smoothing:
        wanted = (1.0 - smoothing) * wanted + smoothing * wide.mean(-1)
    loss = torch.where(counted, normaliser - wanted, 0.0)
    if with_gradient:
        # d/dx of logsumexp(x) - (1 - s) x[target] - s mean(x)
        gradient = wide.sub_(normaliser[:, None]).exp_()
        if smoothing:
            gradient -= smoothing / logits_NV.shape[1]
        gradient.scatter_add_(1, index, torch.full_like(gradient[:, :1], smoothing - 1.0))
        logits_NV.copy_(gradient.masked_fill_(~counted[:, None], 0.0))
    return loss


def _chunks(hidden: torch.Tensor, vocabulary: int) -> list[slice]:
    rows = _CHUNK.get(hidden.device.type, _LARGE_CHUNK) // max(vocabulary, 1)
    rows = max(rows - rows % _ROW_MULTIPLE, _ROW_MULTIPLE)
    return [slice(begin, begin + rows) for begin in range(0, len(hidden), rows)]
