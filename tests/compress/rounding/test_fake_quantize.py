"""Fake quantization against torch's operators, a 64-bit reference, and LSQ's gradient as torch computes it."""

from __future__ import annotations

import pytest
import torch

from penjing.compress.rounding.fake_quantize import ActivationQuantizer, WeightQuantizer, fake_quantize
from penjing.compress.rounding.formats import FP8, INT8_ACTIVATION, INT8_WEIGHT, UINT8
from penjing.core.errors import InputError


def not_at_ties(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Torch multiplies by 1 / scale, ONNX and this code divide: at a tie these may differ."""
    real = x.double() / scale.double()
    return ((real - real.floor()) - 0.5).abs() > 1e-4


@pytest.mark.parametrize("zero", [0, 37, 255])
def test_equal_to_torch_per_tensor_with_gradients(zero: int) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(zero)) * 3
    scale = torch.tensor(0.0171)
    x = x[not_at_ties(x, scale)]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = fake_quantize(ours, scale, torch.tensor(float(zero)), UINT8)
    expected = torch.fake_quantize_per_tensor_affine(theirs, float(scale), zero, 0, 255)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    y.backward(upstream)
    expected.backward(upstream)
    inside = ((x / scale + zero) >= 0) & ((x / scale + zero) <= 255)  # torch judges the rounded value
    assert torch.equal(ours.grad[inside], theirs.grad[inside])  # type: ignore[index]
    assert not bool(ours.grad[~inside].any())  # type: ignore[index]


def test_equal_to_torch_per_channel_and_to_64_bits() -> None:
    weight = torch.randn(12, 5, 3, 3, generator=torch.Generator().manual_seed(2))
    quantizer = WeightQuantizer(12, INT8_WEIGHT)
    quantizer.calibrate(weight)
    y = quantizer(weight)
    scale = weight.flatten(1).abs().amax(1) / 127
    expected = torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros(12, dtype=torch.int32), 0, -127, 127)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)
    wide = scale.double().view(-1, 1, 1, 1)
    torch.testing.assert_close(
        y.double(), (weight.double() / wide).round().clamp(-127, 127) * wide, rtol=1e-6, atol=1e-9
    )
    integers, stored = quantizer.integers(weight)
    assert integers.dtype == torch.int8
    assert torch.equal(integers.float() * stored.view(-1, 1, 1, 1), y)


@pytest.mark.parametrize("zero", [0, 100])
def test_the_gradient_of_a_learned_scale_is_torch_s(zero: int) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(3))
    scale = torch.tensor([0.011])
    stored = x / scale + zero
    ends = ((stored >= -128.5) & (stored <= -127.4)) | ((stored >= 126.4) & (stored <= 127.5))
    x = x[not_at_ties(x, scale) & ~ends]  # torch counts the outermost level as clipped, the paper does not
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(4))
    ours, theirs = scale.clone().requires_grad_(), scale.clone().requires_grad_()
    fake_quantize(x, ours, torch.tensor(float(zero)), INT8_ACTIVATION).backward(upstream)
    learnable = getattr(torch, "_fake_quantize_learnable_per_tensor_affine")  # noqa: B009 (not public)
    learnable(x, theirs, torch.tensor([float(zero)]), -128, 127, 1.0).backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_learned_weight_scales_fall_to_the_least_error() -> None:
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(5))
    weight[:, 0] = 12.0  # an outlier that the largest magnitude pays for
    quantizer = WeightQuantizer(4, INT8_WEIGHT, learned=True)
    quantizer.calibrate(weight)
    before = (quantizer(weight)[:, 1:] - weight[:, 1:]).square().sum()
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        (quantizer(weight)[:, 1:] - weight[:, 1:]).square().sum().backward()
        optimizer.step()
    assert (quantizer(weight)[:, 1:] - weight[:, 1:]).square().sum() < 0.9 * before


def test_an_activation_is_observed_then_rounded_and_the_state_is_kept() -> None:
    quantizer = ActivationQuantizer("stem", UINT8, learned=True)
    x = torch.linspace(-1, 3, 1000)
    assert torch.equal(quantizer(x), x)
    quantizer.mode = "observe"
    assert torch.equal(quantizer(x), x)
    quantizer.calibrate()
    y = quantizer(x)
    assert (y - x).abs().max() <= 4 / 255 * 0.51
    assert len(y.unique()) <= 256
    other = ActivationQuantizer("stem", UINT8, learned=True)
    other.load_state_dict(quantizer.state_dict())
    other.mode = "on"
    assert torch.equal(other(x), y)
    assert bool(other.ready)


def test_zero_and_constant_activations_are_exact() -> None:
    for value in (0.0, 5.0, -2.5, 1e-30):
        for number_format in (UINT8, INT8_ACTIVATION, FP8):
            quantizer = ActivationQuantizer("x", number_format)
            quantizer.mode = "observe"
            quantizer(torch.full((7,), value))
            quantizer.calibrate()
            torch.testing.assert_close(
                quantizer(torch.full((7,), value)), torch.full((7,), value), atol=1e-18, rtol=1e-6
            )


def test_a_quantizer_that_saw_nothing_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"blocks\.3\.input"):
        ActivationQuantizer("blocks.3.input", UINT8).calibrate()


def test_a_zero_channel_and_steps_of_any_length_stay_finite() -> None:
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(6))
    weight[1] = 0
    quantizer = WeightQuantizer(3, INT8_WEIGHT, learned=True)
    quantizer.calibrate(weight)
    assert quantizer.growth is not None
    for growth in (-1e6, -1.0, 1.0, 1e6):
        with torch.no_grad():
            quantizer.growth.fill_(growth)
        y = quantizer(weight)
        assert bool(torch.isfinite(y).all())
        assert bool((quantizer.scales(weight) > 0).all())
        assert not bool(y[1].any())


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_a_step_changes_a_scale_by_a_share_of_itself(size: float) -> None:
    """AdamW's steps are as long as the rate: a scale of 1e-5 must not become 1e-3, nor one of 10 stay as it is."""
    quantizer = ActivationQuantizer("x", UINT8, learned=True)
    quantizer.mode = "observe"
    x = torch.rand(1000, generator=torch.Generator().manual_seed(8)) * size
    quantizer(x)
    quantizer.calibrate()
    before = float(quantizer.positive_scale().detach())
    optimizer = torch.optim.AdamW(quantizer.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(5):
        optimizer.zero_grad()
        quantizer(x * 2).sum().backward()  # clipped: a larger scale gives a larger sum, and is stepped away from
        optimizer.step()
    assert 0.94 < float(quantizer.positive_scale().detach()) / before < 0.96
