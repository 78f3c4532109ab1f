"""The fitted sum: exact where it is the truth, better than plain sums where neighbours matter, ranks as scipy has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from penjing.compress.search.front import pareto_front
from penjing.compress.search.predict import fit, spearman

SINGLES = [np.array([0.0, 0.1 * (place + 1), 0.3 * (place + 1)]) for place in range(5)]
PAIRS = [(place, place + 1) for place in range(4)]


def settings(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, (count, len(SINGLES)))


def coupled(choices: np.ndarray) -> np.ndarray:
    """Neighbours that are both changed cost far more than each alone, and one pair less."""
    alone = np.stack([values[choices[:, place]] for place, values in enumerate(SINGLES)], axis=1)
    pairs = 3 * np.sqrt(alone[:, 0] * alone[:, 1]) - 0.5 * np.sqrt(alone[:, 3] * alone[:, 4])
    return alone @ [1.0, 1.0, 1.0, 0.2, 0.2] + pairs


def test_couplings_are_learnt_from_fifty_combinations() -> None:
    choices, new = settings(50), settings(60, seed=1)
    found = fit(SINGLES, PAIRS, choices, coupled(choices))
    assert found.rank > 0.95
    assert found.rank > found.plain_rank + 0.03
    assert spearman(found.of(new), coupled(new)) > 0.95
    assert found.of(np.zeros((1, 5), np.int64)) == 0


def test_the_front_of_its_tables_is_that_of_what_it_predicts() -> None:
    choices = settings(50)
    found = fit(SINGLES, PAIRS, choices, coupled(choices))
    best = pareto_front([3] * 5, found.tables())  # costs are 0: the front is the best alone
    assert len(best) == 1
    every = np.stack(np.meshgrid(*[range(3)] * 5, indexing="ij"), -1).reshape(-1, 5)
    assert found.of(best.choices)[0] == pytest.approx(found.of(every).min(), abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=20))
def test_ranks_are_correlated_as_by_scipy(pairs: list[tuple[int, int]]) -> None:
    one, other = np.array(pairs, np.float64).T
    if len(set(one)) > 1 and len(set(other)) > 1:
        theirs: Any = spearmanr(one, other)
        assert spearman(one, other) == pytest.approx(float(theirs.statistic))
    else:
        assert spearman(one, other) == 0
