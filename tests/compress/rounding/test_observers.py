"""Observers: percentiles against torch's, error and divergence against a search over the values themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.compress.rounding.formats import INT8_ACTIVATION, UINT8, NumberFormat
from penjing.compress.rounding.observers import Method, Observer
from penjing.core.errors import InputError


def seen(method: Method, *batches: torch.Tensor, percentile: float = 0.9999) -> Observer:
    observer = Observer("layer", method, percentile)
    for batch in batches:
        observer.observe(batch)
    return observer


def outliers() -> torch.Tensor:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    x[:2] = torch.tensor([60.0, -55.0])
    return x


def error(x: torch.Tensor, low: float, high: float, number_format: NumberFormat) -> float:
    scale, zero = number_format.parameters(torch.tensor(low), torch.tensor(high))
    return float(((number_format.store(x / scale, zero) - zero) * scale - x).square().mean())


def test_minmax_covers_everything_and_zero() -> None:
    assert seen("minmax", torch.tensor([1.0, 4.0]), torch.tensor([2.0, 9.0])).range(UINT8) == (0.0, 9.0)
    assert seen("minmax", torch.tensor([-3.0, -1.0])).range(UINT8) == (-3.0, 0.0)


@pytest.mark.parametrize("share", [0.99, 0.999])
def test_percentiles_are_torch_s_to_a_bin(share: float) -> None:
    x = torch.randn(50000, generator=torch.Generator().manual_seed(1)) * 5
    low, high = seen("percentile", *x.split(7000), percentile=share).range(UINT8)
    bin_width = 2 * 32 / 8192
    assert high == pytest.approx(float(torch.quantile(x, share)), abs=2 * bin_width)
    assert low == pytest.approx(float(torch.quantile(x, 1 - share)), abs=2 * bin_width)


@pytest.mark.parametrize("number_format", [UINT8, INT8_ACTIVATION])
def test_mse_finds_what_a_search_over_the_values_finds(number_format: NumberFormat) -> None:
    x = outliers()
    low, high = seen("mse", *x.split(3000)).range(number_format)
    found = error(x, low, high, number_format)
    best = min(error(x, -55 * share, 60 * share, number_format) for share in torch.linspace(0.1, 1, 60).tolist())
    assert found <= 1.02 * best
    assert found < error(x, -55, 60, number_format)


def test_entropy_clips_outliers_and_keeps_a_uniform_range() -> None:
    low, high = seen("entropy", outliers()).range(UINT8)
    assert -30 < low <= -3
    assert 3 <= high < 30
    uniform = torch.rand(100000, generator=torch.Generator().manual_seed(2)) * 8
    low, high = seen("entropy", uniform).range(UINT8)
    assert low == 0
    assert high > 7.5


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), min_size=1, max_size=6))
@settings(max_examples=6, deadline=None)
def test_no_method_leaves_what_was_seen_and_order_does_not_matter(batches: list[list[float]]) -> None:
    tensors = [torch.tensor(batch) for batch in batches]
    for method in ("percentile", "mse", "entropy"):
        observer = seen(method, *tensors)
        low, high = observer.range(UINT8)
        assert observer.lowest <= low <= 0 <= high <= observer.highest
        assert seen(method, *tensors[::-1]).range(UINT8) == (low, high)


def test_zeros_do_not_drown_the_rest() -> None:
    """After a ReLU most values are zero, which every format stores exactly."""
    x = torch.cat([torch.zeros(10**6), torch.rand(1000, generator=torch.Generator().manual_seed(3))])
    for method in ("mse", "entropy"):
        _, high = seen(method, x).range(UINT8)
        assert high > 0.8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["minmax", "entropy"])
def test_nan_and_infinity_are_refused_by_name(bad: float, method: Method) -> None:
    with pytest.raises(InputError, match="activation layer holds NaN or infinity"):
        seen(method, torch.tensor([1.0, bad]))


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "entropy"])
def test_zeros_alone_and_constants_have_a_range(method: Method) -> None:
    assert seen(method, torch.zeros(10)).range(UINT8) == (0.0, 0.0)
    low, high = seen(method, torch.full((10,), 3.0)).range(UINT8)
    assert low == 0
    assert high == pytest.approx(3.0, rel=0.02)


def test_nothing_seen_is_refused() -> None:
    with pytest.raises(InputError, match="no value of the activation layer was seen"):
        Observer("layer").range(UINT8)
    with pytest.raises(InputError, match="is empty"):
        Observer("layer").observe(torch.zeros(0))
