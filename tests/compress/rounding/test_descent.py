"""Integers and grids that are improved behind compensated rounding: less error, nothing that cannot be stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penjing.compress.decoder.compensate import error_spread
from penjing.compress.decoder.int4 import group_range, group_scale, quantize_grouped_compensated, whole_range
from penjing.compress.rounding import descent
from penjing.compress.rounding.descent import Lattice, descend
from penjing.compress.rounding.stepped import quantize_stepped_compensated
from tests.compress.decoder.test_compensate import correlated

FORMS = {
    "scales": lambda weight, spread: quantize_grouped_compensated(weight, 32, spread, group_scale),
    "offsets": lambda weight, spread: quantize_grouped_compensated(weight, 32, spread, group_range),
    "whole offsets": lambda weight, spread: quantize_grouped_compensated(weight, 32, spread, whole_range),
    "whole": lambda weight, spread: quantize_stepped_compensated(weight, 32, spread),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lost(weight: Tensor, found: Tensor, hessian: Tensor) -> Tensor:
    """Of each row, in float64."""
    error = (weight - found).double()
    return ((error @ hessian.double()) * error).sum(dim=1)


@pytest.mark.parametrize("form", FORMS)
def test_every_row_errs_less_than_compensation_alone(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, every = draw(48, 128, seed=1), correlated(4096, 128)
    spread = error_spread(every[:2048])
    improved = FORMS[form](weight, spread).dequantize()
    monkeypatch.setattr(descent, "PASSES", 0)
    compensated = FORMS[form](weight, spread).dequantize()
    seen, fresh = (part.t() @ part for part in (every[:2048], every[2048:]))
    assert (lost(weight, improved, seen) < 1.01 * lost(weight, compensated, seen)).all()  # damping is not in `seen`
    assert lost(weight, improved, fresh).sum() < 0.97 * lost(weight, compensated, fresh).sum()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 3), around=st.booleans(), seed=st.integers(0, 999))
def test_no_move_makes_the_error_larger(rows: int, groups: int, around: bool, seed: int) -> None:
    """From any beginning, with grids that can take every value."""
    weight, spread = draw(rows, 8 * groups, seed=seed), error_spread(correlated(40, 8 * groups, seed=seed))
    number = draw(rows, 8 * groups, seed=seed + 1).mul(4).round().clamp(-8, 7)
    step, offset = draw(rows, groups, seed=seed + 2).exp() / 4, draw(rows, groups, seed=seed + 3)
    lattice = Lattice(number, step, None if around else offset, -8, 7)
    hessian, before = torch.cholesky_inverse(spread, upper=True), lattice.values()

    def free(_: Tensor, best: Tensor, offset_of: object) -> list[tuple[Tensor, Tensor]]:
        return [(best, offset_of(best))]  # type: ignore[operator]

    descend(weight, lattice, spread, free)
    assert (lost(weight, lattice.values(), hessian) <= lost(weight, before, hessian) * (1 + 1e-5)).all()
    assert torch.equal(lattice.number_NK, lattice.number_NK.round().clamp(-8, 7))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_weights", [1e-30, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("of_activations", [1e-15, 1.0, 1e12])
def test_extreme_magnitudes_are_rounded_as_others(
    form: str, of_weights: float, of_activations: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = draw(6, 64, seed=4) * of_weights, correlated(256, 64) * of_activations
    weight[1], weight[2, :32] = 0.0, 0.25 * of_weights
    spread, hessian = error_spread(x), x.double().t() @ x.double()
    improved = FORMS[form](weight, spread).dequantize()
    monkeypatch.setattr(descent, "PASSES", 0)
    compensated = FORMS[form](weight, spread).dequantize()
    found, before = lost(weight, improved, hessian), lost(weight, compensated, hessian)
    assert torch.isfinite(found).all()
    assert (found <= 1.05 * before).all(), (found / before).tolist()
