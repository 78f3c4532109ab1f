"""The blocked divergence against torch's, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penjing.compress.distill.divergence import divergence_sum, top_divergence_sum
from penjing.core.errors import InputError
from penjing.train.objective import cross_entropy


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_BLOCK", {"cpu": 3 * 23})  # three rows at a time


def logits(seed: int, rows: int = 8, classes: int = 23, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(student: torch.Tensor, teacher: torch.Tensor, counted: torch.Tensor, temperature: float) -> torch.Tensor:
    """Hinton's loss as libraries write it."""
    terms = F.kl_div(F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1), reduction="none")
    return (terms.sum(-1) * counted).sum() * temperature**2


@pytest.mark.parametrize("temperature", [0.7, 1.0, 4.0])
def test_value_and_gradient_are_those_of_torch(temperature: float) -> None:
    student, teacher = logits(0).requires_grad_(), logits(1)
    counted = torch.tensor([True, True, False, True, False, True, True, True])
    expected = reference(student, teacher, counted, temperature)
    (wanted,) = torch.autograd.grad(2.5 * expected, student)
    total = divergence_sum(student, teacher, counted, temperature)
    (gradient,) = torch.autograd.grad(2.5 * total, student)
    assert total.item() == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-13)
    assert not gradient[~counted].any()
    assert torch.autograd.gradcheck(lambda x: divergence_sum(x, teacher, counted, temperature), (student,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    student, teacher = logits(2, dtype=dtype).requires_grad_(), logits(3, dtype=dtype)
    counted = torch.ones(8, dtype=torch.bool)
    total = divergence_sum(student, teacher, counted, 2.0)
    total.backward()
    exact = student.detach().double().requires_grad_()
    expected = reference(exact, teacher.double(), counted, 2.0)
    expected.backward()
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert student.grad is not None
    assert student.grad.dtype == dtype
    assert exact.grad is not None
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


def test_a_student_like_its_teacher_has_no_loss_and_no_gradient() -> None:
    student = logits(4, dtype=torch.float32).requires_grad_()
    total = divergence_sum(student, student.detach().clone(), torch.ones(8, dtype=torch.bool), 3.0)
    total.backward()
    assert total.item() == 0.0
    assert student.grad is not None
    assert not student.grad.any()


def top(teacher: torch.Tensor, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    probability, index = F.softmax(teacher / temperature, -1).topk(k, -1)
    rest = F.softmax(teacher / temperature, -1).scatter(1, index, 0.0).sum(-1)
    return index, probability.log(), rest.log()


@pytest.mark.parametrize("k", [1, 5, 23])
def test_the_rest_of_the_classes_counts_as_one(k: int) -> None:
    student, teacher, counted = logits(5).requires_grad_(), logits(6), torch.arange(8) % 3 > 0
    index, log_top, log_rest = top(teacher, k, 2.0)
    total = top_divergence_sum(student, index, log_top, log_rest, counted, 2.0)
    (gradient,) = torch.autograd.grad(total, student)
    q = F.softmax(student / 2.0, -1)
    known = q.gather(1, index)
    outcomes = torch.cat([known, 1 - known.sum(-1, keepdim=True)], 1)[:, : k + (k < 23)]
    wanted = torch.cat([log_top, log_rest[:, None]], 1)[:, : k + (k < 23)].exp()
    expected = 4.0 * (F.kl_div(outcomes.log(), wanted, reduction="none").sum(-1) * counted).sum()
    (wanted_gradient,) = torch.autograd.grad(expected, student)
    assert total.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-9, atol=1e-11)
    full = divergence_sum(student, teacher, counted, 2.0).item()
    assert total.item() <= full + 1e-9
    assert (k == 23) == (total.item() == pytest.approx(full, rel=1e-9))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_teacher_is_refused(bad: float) -> None:
    teacher = logits(7)
    teacher[5, 2] = bad
    with pytest.raises(InputError, match="the teacher's logits hold NaN or infinity"):
        divergence_sum(logits(8), teacher, torch.ones(8, dtype=torch.bool))
