"""Fused linear cross-entropy against F.cross_entropy in float64: loss and gradients, in chunks, on both paths."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels import cross_entropy
from penjing.kernels.cross_entropy import IGNORED, linear_cross_entropy
from penjing.kernels.dispatch import force_torch, gpu_kernels


@pytest.fixture(params=["torch", "triton language"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """ "cpu", plain and then with the kernel, interpreted or on a GPU."""
    if request.param == "torch":
        with force_torch():
            yield "cpu"
    else:
        yield request.getfixturevalue("gpu_device")


def problem(rows: int, inner: int, vocabulary: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + vocabulary)
    hidden = torch.randn(rows, inner, generator=generator).to(device, dtype)
    weight = (torch.randn(vocabulary, inner, generator=generator) / inner**0.5 * 2).to(device, dtype)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.2] = IGNORED
    return hidden, weight, targets.to(device)


def usual(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        hidden @ weight.t(), targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )


def with_gradients(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs, torch.tensor(0.25, device=loss.device).to(loss.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 65), (37, 16, 130), (5, 24, 5000)])
def test_loss_and_gradients(
    device: str, shape: tuple[int, int, int], smoothing: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK", {})
    monkeypatch.setattr(cross_entropy, "_LARGE_CHUNK", 130 * 16)
    monkeypatch.setattr(cross_entropy, "_ROW_MULTIPLE", 16)  # three chunks of 37 rows
    hidden, weight, targets = problem(*shape, dtype, device)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = with_gradients(usual(*wide, targets, smoothing), *wide)
    same_type = with_gradients(usual(*inputs, targets, smoothing), *inputs)
    actual = with_gradients(linear_cross_entropy(*inputs, targets, label_smoothing=smoothing), *inputs)
    assert actual[0].dtype == torch.float32
    assert [x.dtype for x in actual[1:]] == [dtype, dtype]
    for a, s, e in zip(actual, same_type, expected, strict=True):
        atol = (2e-6 if dtype == torch.float32 else 2e-3) * max(1.0, float(e.abs().max()))
        assert (a.double() - e).abs().max() <= 2 * (s.double() - e).abs().max() + atol


def test_only_what_is_asked_for(device: str) -> None:
    hidden, weight, targets = problem(9, 8, 40, torch.float32, device)
    expected = usual(hidden, weight, targets, 0.0)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), expected)
    hidden.requires_grad_()
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden)
    torch.testing.assert_close(gradient, torch.autograd.grad(usual(hidden, weight, targets, 0.0), hidden)[0])


def test_nothing_counted_and_no_rows(device: str) -> None:
    hidden, weight, targets = problem(4, 8, 10, torch.float32, device)
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))
    assert loss == 0
    assert torch.autograd.grad(loss, hidden)[0].eq(0).all()
    assert linear_cross_entropy(hidden[:0], weight, targets[:0]) == 0


def test_logits_far_apart_stay_finite(device: str) -> None:
    hidden = torch.tensor([[1e4], [-1e4]], device=device)
    weight, targets = torch.tensor([[1.0], [-1.0], [0.0]], device=device), torch.tensor([0, 0], device=device)
    assert linear_cross_entropy(hidden, weight, targets).item() == 2e4


def test_autocast_multiplies_in_its_type() -> None:
    hidden, weight, targets = problem(20, 32, 50, torch.float32, "cpu")
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
        expected = F.cross_entropy((hidden @ weight.t()).float(), targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for actual, wanted in zip(
        with_gradients(loss, hidden, weight), with_gradients(expected, hidden, weight), strict=True
    ):
        assert actual.dtype == wanted.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, rtol=0.02, atol=0.02)


def test_a_target_outside_the_vocabulary_is_no_number_or_an_error(device: str) -> None:
    hidden, weight, _ = problem(2, 8, 10, torch.float32, device)
    targets = torch.tensor([3, 10], device=device)
    if gpu_kernels("cross_entropy", hidden) is None:
        with pytest.raises(RuntimeError, match="out of bounds"):
            linear_cross_entropy(hidden, weight, targets)
    else:
        assert linear_cross_entropy(hidden, weight, targets).isnan()


def test_refusals() -> None:
    hidden, weight, targets = problem(4, 8, 10, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"\(4, 8\) and weight \(10, 7\)"):
        linear_cross_entropy(hidden, weight[:, :7], targets)
    with pytest.raises(ValueError, match="int32"):
        linear_cross_entropy(hidden, weight, targets.int())
    with pytest.raises(ValueError, match="label_smoothing=1"):
        linear_cross_entropy(hidden, weight, targets, label_smoothing=1.0)
