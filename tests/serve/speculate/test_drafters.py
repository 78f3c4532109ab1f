"""What is guessed, and from what."""

from __future__ import annotations

from random import Random
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.speculate.drafter import FORCED, LONGEST_MATCH, NO_DRAFT, Draft
from penjing.serve.speculate.forced import ForcedDrafter
from penjing.serve.speculate.lookup import MOST_PLACES, LookupDrafter


def test_what_followed_the_same_tokens_before_is_guessed() -> None:
    assert LookupDrafter([5, 6, 7, 8, 9, 5, 6]).draft(3) == Draft([7, 8, 9], [2, 3, 4])


def test_the_longest_match_is_taken_and_of_equals_the_latest() -> None:
    assert LookupDrafter([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]).draft(1) == Draft([9], [3])
    assert LookupDrafter([1, 2, 7, 1, 2, 8, 1, 2]).draft(1) == Draft([8], [2])


def test_an_answer_that_repeats_itself_is_guessed_to_go_on() -> None:
    assert LookupDrafter([1, 4, 5, 4, 5]).draft(5).token_ids == [4, 5, 4, 5, 4]
    assert LookupDrafter([3] * 20).draft(4) == Draft([3] * 4, [LONGEST_MATCH] * 4)


def test_nothing_is_guessed_where_nothing_comes_back_or_nothing_is_wanted() -> None:
    for token_ids in ([1], [1, 1], [1, 2, 3]):
        assert LookupDrafter(token_ids).draft(4) == NO_DRAFT
    assert LookupDrafter([1, 2, 1, 2]).draft(0) == NO_DRAFT


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12), st.integers(1, 60))
def test_a_list_that_grows_is_guessed_as_one_that_is_given_whole(ids: list[int], most: int, begin: int) -> None:
    growing = ids[:begin]
    drafter = LookupDrafter(growing)
    for token_id in ids[begin:]:
        drafter.draft(most)
        growing.append(token_id)
    assert drafter.draft(most) == LookupDrafter(list(growing)).draft(most) == by_search(growing, most)


def by_search(ids: list[int], most: int) -> Draft:
    """The definition, without an index."""
    places = [place for place in range(2, len(ids)) if ids[place - 2 : place] == ids[-2:]][-MOST_PLACES:]
    best: tuple[int, int] | None = None
    for place in places:
        length = 2
        while length < min(place, LONGEST_MATCH) and ids[place - length - 1] == ids[-length - 1]:
            length += 1
        if best is None or length >= best[0]:
            best = length, place
    if best is None:
        return NO_DRAFT
    ids = list(ids)
    for i in range(most):
        ids.append(ids[best[1] + i])
    return Draft(ids[-most:], [min(best[0] + i, LONGEST_MATCH) for i in range(most)])


def test_a_long_prompt_of_one_token_costs_little() -> None:
    """Every place matches: only the latest few are compared."""
    tokens = [7] * 50_000
    drafter = LookupDrafter(tokens)
    for _ in range(2000):
        tokens.append(drafter.draft(16).token_ids[0])
    assert tokens[-1] == 7


class Form:
    """Stands in for a constraint."""

    def __init__(self, forced: list[int], allowed: int) -> None:
        self._forced, self._allowed = forced, allowed

    def forced(self) -> list[int]:
        return self._forced

    def num_allowed(self, token_ids: list[int]) -> int:
        return min(self._allowed, len(token_ids))


def test_what_a_form_forces_comes_first_and_what_it_forbids_is_not_guessed() -> None:
    lookup = LookupDrafter([5, 6, 7, 8, 9, 5, 6])
    assert ForcedDrafter(cast(Any, Form([1, 2, 3], 0)), lookup).draft(2) == Draft([1, 2], [FORCED] * 2)
    assert ForcedDrafter(cast(Any, Form([], 2)), lookup).draft(4) == Draft([7, 8], [2, 3])
    assert ForcedDrafter(cast(Any, Form([], 0)), lookup).draft(4) == NO_DRAFT
    assert ForcedDrafter(cast(Any, Form([1], 1)), lookup).draft(0) == NO_DRAFT


def test_random_tokens_are_hardly_guessed() -> None:
    random = Random(0)
    tokens = [random.randrange(50_000) for _ in range(2000)]
    assert LookupDrafter(tokens).draft(8) == NO_DRAFT
