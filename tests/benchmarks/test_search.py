"""The rows of run_search.py from a finished search."""

from __future__ import annotations

from run_search import KEY, search_rows

from penjing.train.search.state import SearchState, Trial


def test_what_the_search_chose_stands_beside_the_grid() -> None:
    trials = [Trial(settings={KEY: peak}) for peak in (1e-3, 1e-2, 1e-1, 1e-4)]
    state = SearchState(
        key="", base="x", metric="loss", goal="lowest", rungs=[(10, 4), (100, 1)], trials=trials, winner=0
    )
    rows = {row.metric: row for row in search_rows(state, {0: 4.4, 1: 4.0, 2: 9.0, 3: 5.0})}
    assert (rows["loss"].value, rows["loss"].ratio) == (4.4, 1.1)
    assert (rows["learning_rate"].value, rows["learning_rate"].ratio) == (1e-3, 0.1)
    assert (rows["steps"].value, rows["steps"].ratio) == (130, 0.325)
