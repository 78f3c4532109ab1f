"""8-bit gradients: right on average, the same bytes on torch and in the Triton language, and their edges."""

import numpy as np
import pytest
import torch

from penjing.kernels.quantize_gradient import (
    dequantize_gradient,
    dequantize_gradient_torch,
    packed_size,
    quantize_gradient,
    quantize_gradient_torch,
    uniform,
)


def draw(count: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * torch.rand(count, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("count", "chunk"), [(1, 16), (64, 64), (1000, 128), (4097, 2048)])
def test_both_implementations_pack_the_same_bytes(gpu_device: str, count: int, chunk: int, dtype: torch.dtype) -> None:
    gradient = draw(count, dtype=dtype).to(gpu_device)
    packed = quantize_gradient(gradient, 7, chunk)
    assert packed.shape == (packed_size(count, chunk),)
    assert torch.equal(packed, quantize_gradient_torch(gradient, 7, chunk))
    several = torch.stack([quantize_gradient(gradient, seed, chunk) for seed in range(3)])
    torch.testing.assert_close(
        dequantize_gradient(several, count, chunk),
        dequantize_gradient_torch(several, count, chunk),
        rtol=1e-6,
        atol=1e-9,
    )


def test_the_mean_over_seeds_is_the_gradient() -> None:
    gradient, seeds = draw(3000), 400
    step = torch.stack([chunk.abs().max() / 127 for chunk in gradient.split(256)]).repeat_interleave(256)[:3000]
    restored = torch.stack(
        [dequantize_gradient(quantize_gradient(gradient, seed, 256), 3000, 256) for seed in range(seeds)]
    )
    error = (restored - gradient) / step
    assert error.abs().max() < 1.0 + 1e-5  # the neighbours above and below, never another code
    # The mean of 400 draws of deviation ≤ ½ step has a deviation ≤ 0.025; 3000 of them stay within 5 of those.
    assert error.mean(0).abs().max() < 5 * 0.5 / seeds**0.5
    assert abs(float(error.mean())) < 5 * 0.5 / (seeds * 3000) ** 0.5
    fraction = (gradient / step) % 1.0
    expected = (fraction * (1 - fraction)).mean()
    assert float(error.var(0).mean()) == pytest.approx(float(expected), rel=0.02)


def test_draws_are_uniform_and_independent_of_their_neighbours() -> None:
    counter = torch.arange(1 << 16)
    one, other = uniform(counter, 1), uniform(counter, 2)
    assert ((one >= 0) & (one < 1)).all()
    counts = torch.histc(one, 64, 0, 1)
    assert float(((counts - 1024) ** 2 / 1024).sum()) < 63 + 5 * (2 * 63) ** 0.5  # chi-squared, five deviations
    for a, b in ((one, other), (one[1:], one[:-1])):
        assert abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1])) < 5 / len(a) ** 0.5
    assert not torch.equal(uniform(counter + (1 << 32), 1), one)


def test_the_mean_of_several_processes() -> None:
    gradients = [draw(500, seed) for seed in range(4)]
    packed = torch.stack([quantize_gradient(gradient, rank) for rank, gradient in enumerate(gradients)])
    bound = sum(float(gradient.abs().max()) for gradient in gradients) / 4 / 127
    assert (dequantize_gradient(packed, 500) - torch.stack(gradients).mean(0)).abs().max() <= bound * 1.0001
    assert packed[0].numel() * 3.9 < 2048 * 4  # a quarter of float32, up to padding and scales


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_damage_stays_in_its_chunk(gpu_device: str, value: float) -> None:
    gradient = torch.ones(64, device=gpu_device)
    gradient[20] = value
    with np.errstate(invalid="ignore"):
        packed = quantize_gradient(gradient, 0, 16)
    restored = dequantize_gradient(packed, 64, 16)
    assert restored[16:32].isnan().all()
    assert restored[:16].eq(1).all()
    assert restored[32:].eq(1).all()


def test_zeros_and_nothing(gpu_device: str) -> None:
    assert dequantize_gradient(quantize_gradient(torch.zeros(40, device=gpu_device), 3, 16), 40, 16).eq(0).all()
    empty = quantize_gradient(torch.zeros(0, device=gpu_device), 3)
    assert empty.numel() == 0
    assert dequantize_gradient(empty, 0).numel() == 0


def test_refusals() -> None:
    with pytest.raises(ValueError, match="int64"):
        quantize_gradient(torch.arange(3), 0)
    with pytest.raises(ValueError, match="seed=-1"):
        quantize_gradient(torch.ones(3), -1)
    with pytest.raises(ValueError, match="chunk=48"):
        quantize_gradient(torch.ones(3), 0, 48)
    with pytest.raises(ValueError, match=r"uint8 \(20,\)"):
        dequantize_gradient(torch.zeros(19, dtype=torch.uint8), 10, 16)
