"""Importance and ranking: what goes first, in which numbers, under which budget."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penjing.compress.prune.graph import Group, Place, dependency_graph
from penjing.compress.prune.importance import activation, magnitude, random, taylor
from penjing.compress.prune.ranking import meet, select
from penjing.compress.prune.surgery import mask, remove
from penjing.core.errors import ConfigError, InputError


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def two_layers() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers()


def group_of(model: nn.Module) -> Group:
    return dependency_graph(model, (torch.randn(2, 4),)).groups[0]


def made_group(count: int, each: int = 1, name: str = "a") -> Group:
    place = Place(f"{name}.weight", 0)
    return Group((place,), tuple((np.arange(unit * each, (unit + 1) * each),) for unit in range(count)))


@pytest.mark.parametrize("power", [1, 2])
def test_magnitude_is_the_norm_of_all_that_goes(power: int) -> None:
    model = two_layers()
    (scores,) = magnitude(model, [group_of(model)], power)  # pyright: ignore[reportArgumentType]
    first, second = model.first, model.second
    for unit in range(6):
        parts = torch.cat([first.weight[unit], first.bias[unit, None], second.weight[:, unit]])
        assert scores[unit] == pytest.approx(float(parts.detach().norm(power)), rel=1e-6)


def test_taylor_foresees_the_change_of_the_loss() -> None:
    """For units whose weights are tiny, first order is all there is."""
    model = two_layers().double()
    group = group_of(model.float())
    model.double()
    with torch.no_grad():
        for place, index in zip(group.places, group.units[2], strict=True):
            parameter, where = model.get_parameter(place.tensor), torch.from_numpy(index)
            parameter.index_copy_(place.dim, where, 1e-4 * parameter.index_select(place.dim, where))
    x, y = torch.randn(32, 4, dtype=torch.float64), torch.randn(32, 3, dtype=torch.float64)
    loss = nn.functional.mse_loss(model(x), y)
    (scores,) = taylor(model, [group], [nn.functional.mse_loss(model(x), y)])
    without = copy.deepcopy(model)
    mask(without, [(group, [2])])
    change = abs((nn.functional.mse_loss(without(x), y) - loss).item())
    # Both the unit's input and output weights are tiny, so the product's derivative counts each once.
    assert scores[2] / 2 == pytest.approx(change, rel=1e-2)
    assert scores[2] == scores.min()


def test_taylor_squares_the_change_of_each_loss_and_keeps_no_gradient() -> None:
    model, batches = two_layers(), torch.randn(3, 8, 4)
    group = group_of(model)
    (scores,) = taylor(model, [group], (model(x).square().mean() for x in batches))
    assert all(parameter.grad is None for parameter in model.parameters())
    squares = np.zeros(6)
    for x in batches:
        single = copy.deepcopy(model).requires_grad_(True)
        single(x).square().mean().backward()
        for unit in range(6):
            changes = 0.0
            for place, index in zip(group.places, group.units[unit], strict=True):
                parameter = single.get_parameter(place.tensor)
                assert parameter.grad is not None
                product = (parameter * parameter.grad).detach().double()
                changes += float(product.index_select(place.dim, torch.from_numpy(index)).sum())
            squares[unit] += changes**2
    np.testing.assert_allclose(scores, np.sqrt(squares / 3), rtol=1e-4)


def test_changes_of_either_sign_do_not_cancel() -> None:
    """At a minimum the signed changes of all losses sum to nothing, though each loss needs the unit."""
    model = two_layers()
    group, x = group_of(model), torch.randn(8, 4)
    (one,) = taylor(model, [group], [model(x).sum()])
    (both,) = taylor(model, [group], (sign * model(x).sum() for sign in (1, -1)))
    np.testing.assert_allclose(both, one)
    assert both.max() > 0


def test_taylor_wants_losses_that_reach_the_groups() -> None:
    model = two_layers()
    for losses in ([], [model.second(torch.randn(2, 6)).sum()]):
        with pytest.raises(InputError, match=r"no calibration batch gives first\.bias a gradient"):
            taylor(model, [group_of(model)], losses)


def test_activation_sees_what_the_data_never_uses() -> None:
    model = two_layers()
    with torch.no_grad():
        model.first.weight[3] *= 100  # large, but the relu of it is never positive
        model.first.bias[3] = -1e6
    (scores,) = activation(model.train(), [group_of(model)], [(torch.randn(16, 4),)])
    assert scores[3] == 0
    assert (np.delete(scores, 3) > 0).all()
    assert magnitude(model, [group_of(model)])[0].argmax() == 3
    assert model.training
    with pytest.raises(InputError, match="at least one batch"):
        activation(model, [group_of(model)], [])


def test_random_is_the_same_for_a_seed() -> None:
    groups = [made_group(5), made_group(7)]
    assert all((a == b).all() for a, b in zip(random(groups, 1), random(groups, 1), strict=True))
    assert not (random(groups, 1)[0] == random(groups, 2)[0]).all()


@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=4),
    share=st.floats(0, 0.99),
    round_to=st.sampled_from([1, 2, 8]),
    scope=st.sampled_from(["local", "global", "isomorphic"]),
    seed=st.integers(0, 100),
)
def test_selection_takes_the_least_and_leaves_round_numbers(counts, share, round_to, scope, seed) -> None:
    groups = [made_group(count, name=str(index)) for index, count in enumerate(counts)]
    scores = random(groups, seed)
    chosen = select(groups, scores, share, scope=scope, round_to=round_to)
    assert sum(len(units) for _, units in chosen) <= share * sum(counts) + 1e-6
    for group, units in chosen:
        kept = np.setdiff1d(np.arange(len(group)), units)
        values = scores[groups.index(group)]
        assert len(kept) % round_to == 0
        assert values[units].max() <= values[kept].min()


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize(("share", "count", "gone"), [(0.29, 100, 29), (0.57, 100, 57), (0.58, 50, 29), (0.3, 9, 2)])
def test_a_share_that_is_whole_loses_no_unit_to_floating_point(scope, share: float, count: int, gone: int) -> None:
    ((_, units),) = select([made_group(count)], [np.arange(float(count))], share, scope=scope, round_to=1)
    assert len(units) == gone
    ((_, units),) = select([made_group(count)], [np.ones(count)], 0.95, max_share=share, round_to=1)
    assert len(units) == gone


def test_heads_need_no_rounding() -> None:
    chosen = select([made_group(6, each=8)], [np.arange(6.0)], 0.5, round_to=8)
    assert [units for _, units in chosen] == [[0, 1, 2]]


def test_ranking_over_all_groups_takes_more_where_it_costs_less() -> None:
    groups = [made_group(10, name="a"), made_group(10, name="b")]
    scores = [np.array([1.0] * 5 + [100.0] * 5), np.full(10, 7.0)]
    chosen = {group.name[0]: len(units) for group, units in select(groups, scores, 0.25, scope="global", round_to=1)}
    assert chosen == {"a": 5}


def test_changes_of_the_loss_are_compared_as_they_are() -> None:
    groups = [made_group(10, name="a"), made_group(10, name="b")]
    scores = [np.array([1.0] * 5 + [100.0] * 5), np.full(10, 0.5)]
    found = select(groups, scores, 0.25, scope="global", round_to=1, one_scale=True)
    assert {group.name[0]: len(units) for group, units in found} == {"b": 5}


@pytest.mark.parametrize(
    ("share", "round_to", "words"), [(1.0, 8, "share=1.0"), (-0.1, 8, "share=-0.1"), (0.5, 0, "round_to=0")]
)
def test_refuses_numbers_out_of_range(share: float, round_to: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        select([made_group(4)], [np.ones(4)], share, round_to=round_to)


def test_refuses_scores_that_are_no_numbers() -> None:
    with pytest.raises(InputError, match=r"a\.weight.*NaN"):
        select([made_group(4)], [np.array([1, 2, np.nan, 3])], 0.5)


def test_a_budget_is_met_by_the_smallest_share() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    graph = dependency_graph(model, (torch.randn(2, 4),))
    whole = sum(p.numel() for p in model.parameters())

    def left(share: float) -> float:
        pruned = copy.deepcopy(model)
        remove(pruned, select(graph.groups, magnitude(model, graph.groups), share, round_to=1))
        return sum(p.numel() for p in pruned.parameters()) / whole

    share = meet(0.5, left)
    assert 0.48 <= left(share) <= 0.5
    assert meet(1.0, left) == 0
    with pytest.raises(InputError, match="cannot reach"):
        meet(0.01, left)
