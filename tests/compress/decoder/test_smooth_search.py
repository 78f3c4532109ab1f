"""The search of smoothing scales: its formula is the measured error, and it beats every alpha."""

from __future__ import annotations

import pytest
import torch

from penjing.compress.decoder.smooth import QUANTILE, Heads, by_alpha, channel_magnitude
from penjing.compress.decoder.smooth_search import ALPHAS, CANDIDATES, SEARCH_ROWS, RoundingNoise, Search
from penjing.compress.decoder.weights import fake_quantize_activation, quantize_per_channel
from penjing.compress.rounding.signs import aligned_signs


def heavy_tailed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations with a few large channels and a few huge tokens, and a weight of uneven columns."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    x[::17, :3] *= 30
    weight = torch.randn(48, columns, generator=generator) * torch.randn(columns, generator=generator).mul(0.5).exp()
    return x, weight


def measured(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> float:
    rounded = fake_quantize_activation(x / scale) @ quantize_per_channel(weight * scale).dequantize().t()
    return float((rounded - x @ weight.t()).square().sum())


def test_the_formula_is_proportional_to_the_error_that_rounding_makes() -> None:
    x, weight = heavy_tailed(512, 64)
    ratios = []
    for alpha in (0.2, 0.5, 0.8):
        scale = by_alpha(x, weight, alpha, None)
        ratios.append(measured(x, weight, scale) / float(RoundingNoise(x, weight, torch.ones(512))(scale)))
    wanted = 1 / (12 * 127**2)
    assert all(0.7 * wanted < ratio < 1.3 * wanted for ratio in ratios), [ratio / wanted for ratio in ratios]


def test_its_gradient_is_that_of_the_formula_written_out() -> None:
    x, weight = heavy_tailed(64, 32)
    tokens = torch.rand(64, generator=torch.Generator().manual_seed(1))

    def formula(scale: torch.Tensor) -> torch.Tensor:
        energy = (weight * scale).square().sum()
        activation = ((x / scale).abs().amax(1).square() * tokens).sum() * energy
        return activation + (weight * scale).abs().amax(1).square().sum() * (tokens[:, None] * (x / scale) ** 2).sum()

    scale = torch.rand(32, generator=torch.Generator().manual_seed(2)).add(0.5).requires_grad_()
    (wanted,) = torch.autograd.grad(formula(scale), scale)
    noise, found = RoundingNoise(x, weight, tokens).gradient(scale.detach())
    assert torch.allclose(found, wanted * scale, rtol=1e-4)  # by the logarithm of the scale
    assert torch.allclose(noise, formula(scale))


@pytest.mark.parametrize(("group", "above"), [(0, False), (0, True), (32, False)])
def test_the_channels_that_come_near_give_the_same_noise_and_gradient(group: int, above: bool) -> None:
    x, weight = heavy_tailed(128, 8 * CANDIDATES)
    scale = by_alpha(x, weight, 0.5, None)
    whole = RoundingNoise(x, weight, torch.ones(128), group, above)
    near = whole.near(scale)
    assert near(scale).equal(whole(scale))
    moved = scale * torch.rand(len(scale), generator=torch.Generator().manual_seed(3)).add(0.7)
    (_, wanted), (_, found) = whole.gradient(moved), near.gradient(moved)
    assert torch.allclose(found, wanted, rtol=1e-3)


@pytest.mark.parametrize(("group", "above", "rounds"), [(0, False, True), (0, True, True), (32, False, False)])
def test_its_gradient_is_how_much_it_changes(group: int, above: bool, rounds: bool) -> None:
    x, weight = (values.double() for values in heavy_tailed(64, 64))
    noise = RoundingNoise(x, weight, torch.ones(64).double(), group, above, rounds)
    scale = torch.rand(64, generator=torch.Generator().manual_seed(2)).double().add(0.5)
    value, gradient = noise.gradient(scale)
    assert value.equal(noise(scale))
    for channel in range(0, 64, 5):
        step = torch.zeros(64).double()
        step[channel] = 1e-7
        changed = (noise(scale * step.exp()) - noise(scale * (-step).exp())) / 2e-7
        assert float(changed) == pytest.approx(float(gradient[channel]), rel=1e-4, abs=1e-6 * float(value))


@pytest.mark.parametrize("rows", [1, 2, 50, 101, 999])
def test_how_large_a_channel_gets_is_the_quantile_that_torch_finds(rows: int) -> None:
    x, _ = heavy_tailed(rows, 16)
    relative = x.abs() / x.abs().amax(dim=1, keepdim=True)
    assert torch.allclose(channel_magnitude(x), torch.quantile(relative, QUANTILE, dim=0), rtol=1e-5)


def test_it_beats_every_alpha_on_fresh_tokens() -> None:
    x, weight = heavy_tailed(1024, 64)
    scale = Search(torch.ones(512), steps=60)(x[:512], weight, 0.5, None)
    best = min(measured(x[512:], weight, by_alpha(x[:512], weight, alpha, None)) for alpha in ALPHAS)
    assert measured(x[512:], weight, scale) < 0.9 * best


def test_channels_that_few_tokens_excite_are_seen() -> None:
    """With more tokens than a step looks at, too: a neuron of one language, or of one kind of text."""
    x, weight = heavy_tailed(3 * SEARCH_ROWS, 64)
    x[1::48, 5] *= 100  # never among every third token
    scale = Search(torch.ones(len(x)), steps=60)(x, weight, 0.5, None)
    missed = Search(torch.ones(SEARCH_ROWS), steps=60)(x[::3].contiguous(), weight, 0.5, None)
    assert measured(x, weight, scale) < 0.7 * measured(x, weight, missed)


def test_query_heads_share_the_scales_of_their_value_head() -> None:
    x, weight = heavy_tailed(256, 4 * 8)
    heads = Heads(num_value_heads=2, head_dim=8)
    scale = Search(torch.ones(256), steps=10)(x, weight, 0.5, heads)
    assert scale.shape == (16,)
    spread = heads.of_queries(scale, 32).view(2, 2, 8)
    assert torch.equal(spread[:, 0], spread[:, 1])


@pytest.mark.parametrize("x", [torch.zeros(32, 16), torch.ones(32, 16), torch.ones(1, 16) * 1e-30])
def test_awkward_activations_give_positive_finite_scales(x: torch.Tensor) -> None:
    weight = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    weight[:, 3] = 0
    scale = Search(torch.ones(len(x)), steps=5)(x, weight, 0.5, None)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


def test_where_tokens_have_zero_points_signs_gather_what_sticks_out_on_one_side() -> None:
    """Summed over four orders of the channels: a single search ends elsewhere on another processor, and may lose."""
    columns, tokens = 64, torch.ones(512)
    lost: dict[str, float] = dict.fromkeys(("plain", "signed", "without zero points"), 0.0)
    for seed in range(4):
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
        x, weight = (values[:, order] for values in heavy_tailed(1024, columns))
        x[:, ::2] = x[:, ::2].abs() * torch.tensor([1.0, -1.0]).repeat(columns // 4)  # half have one side
        plain, signed = (Search(tokens, steps=60, above=above)(x[:512], weight, 0.5, None) for above in (False, True))
        assert (plain > 0).all()
        assert (signed < 0).any()
        for name, scale in (("plain", plain), ("signed", signed)):
            stored = quantize_per_channel(weight * scale).dequantize()
            rounded = fake_quantize_activation(x[512:] / scale, above=True) @ stored.t()
            lost[name] += float((rounded - x[512:] @ weight.t()).square().sum())
        lost["without zero points"] += measured(x[512:], weight, plain)
    assert lost["signed"] < 0.95 * lost["plain"]
    assert lost["signed"] < 0.75 * lost["without zero points"]


def test_signs_never_widen_a_range() -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(200, 2 + 7 * seed, generator=generator) + torch.randn(2 + 7 * seed, generator=generator)
        signs = aligned_signs(x, torch.ones(200))
        assert signs.abs().eq(1).all()

        def squares(x: torch.Tensor) -> float:
            return float((x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)).square().sum())

        assert squares(x * signs) <= squares(x)
    assert aligned_signs(torch.zeros(3, 4), torch.ones(3)).eq(1).all()
