"""Kullback-Leibler divergence from a teacher's distribution to a student's, without full-size float32 copies.

Both distributions are softened by a temperature T and the divergence is multiplied by T², so that its gradient keeps
its size whatever T is (Hinton et al., https://arxiv.org/abs/1503.02531).

Rows go through float32 a block at a time, as in `train/objective/cross_entropy.py`: beside the two logits, the plain
way takes five arrays of their size (measured at a vocabulary of 49 152), this one the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from penjing.core.errors import InputError
from penjing.train.objective.cross_entropy import row_blocks

_LARGE_BLOCK = 2**26  # two logits of it are widened at a time


def divergence_sum(student_NV: Tensor, teacher_NV: Tensor, counted_N: Tensor, temperature: float = 1.0) -> Tensor:
    """T² × Σ over the counted rows of KL(softmax(teacher / T) ‖ softmax(student / T)).

    Args:
        student_NV, teacher_NV: (N, V) floating, finite; only the student gets a gradient, in its dtype.
        counted_N: (N,) bool.

    Returns:
        A scalar, float32 (float64 for float64 logits), differentiable once.

    Raises:
        InputError: the teacher's logits hold NaN or infinity.
    """
    return _Divergence.apply(student_NV, teacher_NV, counted_N, temperature)  # pyright: ignore[reportReturnType]


def top_divergence_sum(
    student_NV: Tensor, index_NK: Tensor, top_NK: Tensor, rest_N: Tensor, counted_N: Tensor, temperature: float = 1.0
) -> Tensor:
    """`divergence_sum` where of the teacher only the K likeliest classes are known: all others are one more class.

    It never exceeds the full divergence, and equals it when K = V.

    Args:
        index_NK: (N, K) int64, the classes.
        top_NK: (N, K) their log-probabilities at this temperature.
        rest_N: (N,) log of the probability of all others together; -inf when there are none.
    """
    return _TopDivergence.apply(  # pyright: ignore[reportReturnType]
        student_NV, index_NK, top_NK, rest_N, counted_N, temperature
    )


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, counted: Tensor, temperature: float) -> Tensor:
        wide = _wide(student)
        normalisers = torch.empty(2, len(student), dtype=wide, device=student.device)
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        for rows in row_blocks(student, _LARGE_BLOCK):
            s, t = student[rows].to(wide) / temperature, teacher[rows].to(wide) / temperature
            normalisers[0, rows], normalisers[1, rows] = torch.logsumexp(s, -1), torch.logsumexp(t, -1)
            probability = (t - normalisers[1, rows, None]).exp_()
            terms = (probability * t.sub_(s)).sum(-1) + normalisers[0, rows] - normalisers[1, rows]
            total += torch.where(counted[rows], terms, 0.0).sum(dtype=torch.float64)
        _check_teacher(normalisers[1])
        ctx.save_for_backward(student, teacher, normalisers, counted)
        ctx.temperature = temperature
        return (total * temperature**2).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, teacher, normalisers, counted = ctx.saved_tensors
        scale = torch.where(counted, gradients[0] * ctx.temperature, 0.0)[:, None]
        result = torch.empty_like(student)
        for rows in row_blocks(student, _LARGE_BLOCK):
            q, p = (
                (logits[rows].to(normalisers.dtype) / ctx.temperature - normaliser[rows, None]).exp_()
                for logits, normaliser in zip((student, teacher), normalisers, strict=True)
            )
            result[rows] = q.sub_(p).mul_(scale[rows])  # T² × d/dx = T × (q - p)
        return result, None, None, None


class _TopDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, index: Tensor, top: Tensor, rest: Tensor, counted: Tensor, temperature: float
    ) -> Tensor:
        wide = _wide(student)
        normaliser, other = (torch.empty(len(student), dtype=wide, device=student.device) for _ in range(2))
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        for rows in row_blocks(student, _LARGE_BLOCK):
            s = student[rows].to(wide) / temperature
            normaliser[rows] = torch.logsumexp(s, -1)
            known = s.gather(1, index[rows]) - normaliser[rows, None]
            other[rows] = s.scatter_(1, index[rows], -torch.inf).logsumexp(-1) - normaliser[rows]
            terms = (top[rows].exp() * (top[rows] - known)).sum(-1)
            terms += torch.where(rest[rows] > -torch.inf, rest[rows].exp() * (rest[rows] - other[rows]), 0.0)
            total += torch.where(counted[rows], terms, 0.0).sum(dtype=torch.float64)
        _check_teacher(top.sum(-1))
        ctx.save_for_backward(student, index, top, rest, counted, normaliser, other)
        ctx.temperature = temperature
        return (total * temperature**2).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        student, index, top, rest, counted, normaliser, other = ctx.saved_tensors
        scale = torch.where(counted, gradients[0] * ctx.temperature, 0.0)[:, None]
        # Of the others, each gets its part of the class that they are together.
        share = torch.where(rest > -torch.inf, (rest - other).exp(), 0.0)
        result = torch.empty_like(student)
        for rows in row_blocks(student, _LARGE_BLOCK):
            q = (student[rows].to(normaliser.dtype) / ctx.temperature - normaliser[rows, None]).exp_()
            known = q.gather(1, index[rows]) - top[rows].exp().to(q.dtype)
            q.mul_(1.0 - share[rows, None]).scatter_(1, index[rows], known)
            result[rows] = q.mul_(scale[rows])
        return result, None, None, None, None, None


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check_teacher(values: Tensor) -> None:
    if not isinstance(values, FakeTensor) and not bool(values.isfinite().all()):
        raise InputError("the teacher's logits hold NaN or infinity; its weights or the data are damaged: check both")
