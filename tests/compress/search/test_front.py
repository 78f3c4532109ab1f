"""The exact front, against every combination, against a solver of integer programs and against a genetic search."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from penjing.compress.search.front import Front, Table, best_of, evenly_spread, pareto_front
from penjing.core.errors import ConfigError


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Table]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scopes = draw(st.lists(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=3), min_size=1, max_size=8))
    return sizes, [table(generator, sizes, sorted(scope)) for scope in scopes]


def table(generator: np.random.Generator, sizes: list[int], scope: list[int]) -> Table:
    shape = [sizes[each] for each in scope]
    cost, loss = (generator.integers(-9, 10, shape).astype(np.float64) for _ in range(2))
    return Table(tuple(scope), cost, loss)


def totals(tables: list[Table], choice: Any) -> tuple[float, float]:
    places = [tuple(choice[each] for each in table.scope) for table in tables]
    return (
        float(sum(table.cost[place] for table, place in zip(tables, places, strict=True))),
        float(sum(table.loss[place] for table, place in zip(tables, places, strict=True))),
    )


def brute(sizes: list[int], tables: list[Table]) -> list[tuple[float, float]]:
    every = [totals(tables, choice) for choice in product(*map(range, sizes))]
    return sorted(
        {
            (cost, loss)
            for cost, loss in every
            if not any((c <= cost and found <= loss) and (c, found) != (cost, loss) for c, found in every)
        }
    )


def as_pairs(front: Front) -> list[tuple[float, float]]:
    return list(zip(front.cost.tolist(), front.loss.tolist(), strict=True))


@given(problems())
def test_the_front_is_that_of_all_combinations(problem: tuple[list[int], list[Table]]) -> None:
    sizes, tables = problem
    front = pareto_front(sizes, tables)
    assert front.exact
    assert as_pairs(front) == brute(sizes, tables)
    for pair, choice in zip(as_pairs(front), front.choices.tolist(), strict=True):
        assert totals(tables, choice) == pair


def test_a_knapsack_is_solved_as_by_an_integer_program() -> None:
    """Multiple choice, under ten budgets: HiGHS finds the same least loss."""
    generator = np.random.default_rng(0)
    sizes = [4] * 7
    tables = [table(generator, sizes, [place]) for place in range(len(sizes))]
    front = pareto_front(sizes, tables)
    costs, losses = (np.concatenate([getattr(each, name) for each in tables]) for name in ("cost", "loss"))
    one_each = np.kron(np.eye(len(sizes)), np.ones(4))
    for budget in np.linspace(front.cost[0], front.cost[-1], 10):
        limits = [LinearConstraint(one_each, 1, 1), LinearConstraint(costs[None], -np.inf, budget)]
        solved = milp(losses, integrality=np.ones(len(costs)), bounds=Bounds(0, 1), constraints=limits)
        assert front.loss[front.cost <= budget + 1e-9].min() == pytest.approx(solved.fun)


def test_no_genetic_search_beats_it() -> None:
    """NSGA-II of optuna over the same tables, couplings too: none of its points is outside the exact front."""
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    generator = np.random.default_rng(1)
    sizes = [3] * 6
    tables = [table(generator, sizes, [place, place + 1]) for place in range(5)]
    front = pareto_front(sizes, tables)

    def objective(trial: Any) -> tuple[float, float]:
        return totals(tables, [trial.suggest_int(str(place), 0, 2) for place in range(6)])

    study = optuna.create_study(directions=["minimize"] * 2, sampler=optuna.samplers.NSGAIISampler(seed=0))
    study.optimize(objective, n_trials=300)
    for trial in study.best_trials:
        assert any(cost <= trial.values[0] and loss <= trial.values[1] for cost, loss in as_pairs(front))


def test_a_long_front_is_thinned_and_says_so() -> None:
    generator = np.random.default_rng(2)
    sizes = [4] * 8
    steps = np.sort(generator.random((2, 8, 4)), axis=2)  # what costs less loses more
    tables = [Table((place,), steps[0, place], steps[1, place, ::-1]) for place in range(8)]
    whole, thin = pareto_front(sizes, tables), pareto_front(sizes, tables, most_points=16)
    assert whole.exact
    assert not thin.exact
    assert len(thin) <= 16 < len(whole)
    step = (whole.cost[-1] - whole.cost[0]) / 15
    for cost, loss in as_pairs(thin):  # within a step of cost for each variable of the best there is
        assert loss <= whole.loss[whole.cost <= cost - 8 * step].min(initial=np.inf) + 1e-9
        assert loss >= whole.loss[whole.cost <= cost + 1e-9].min() - 1e-9


def test_variables_that_all_depend_on_each_other_are_refused() -> None:
    sizes = [4] * 9
    pairs = [(first, second) for first in range(9) for second in range(first)]
    tables = [Table((second, first), np.ones((4, 4)), np.ones((4, 4))) for first, second in pairs]
    with pytest.raises(ConfigError, match="9 choices of the space depend on each other at once, 65,536"):
        pareto_front(sizes, tables)


def test_points_are_spread_over_ratios() -> None:
    cost = np.array([1.0, 1.1, 2.0, 3.9, 8.0])
    assert evenly_spread(cost, 9) == [0, 1, 2, 3, 4]
    assert evenly_spread(cost, 4) == [0, 2, 3, 4]
    assert best_of(np.array([2.0, 1.0, 1.0, 3.0]), np.array([1.0, 2.0, 2.0, 1.0])).tolist() == [1, 0]
