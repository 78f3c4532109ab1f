"""The page of a search."""

from __future__ import annotations

import pytest

from penjing.train.search.page import search_page
from penjing.train.search.state import SearchState, Trial


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ({"evaluations": {4: {"loss": 3.5}}}, "has 3.5000 at step 4"),
        ({"evaluations": {4: {"loss": None}}}, "has no number at step 4"),
        ({}, "was not evaluated"),
        ({"reason": "out of memory"}, "failed"),
        ({"evaluations": {4: {"loss": 3.5}}, "reason": "out of memory"}, "failed"),
    ],
)
def test_what_became_of_the_recipe_as_it_was(first: dict[str, object], said: str) -> None:
    settings = {"learning_rate.peak": 0.1}
    trials = [Trial.model_validate({"settings": settings} | first)]
    trials += [Trial(settings={"learning_rate.peak": 0.2}, evaluations={4: {"loss": 3.0}, 8: {"loss": 2.5}})]
    state = SearchState(
        key="", base="small.toml", metric="loss", goal="lowest", rungs=[(4, 2), (8, 1)], trials=trials, winner=1
    )
    page = search_page(state)
    assert f"the recipe as it was {said}." in " ".join(page.split())
    assert "inf" not in page.partition("<svg")[0].partition("<p>")[2]
