"""What is guessed, and from what."""

from __future__ import annotations

from random import Random
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.speculate.drafter import (
    AGREED,
    DIFFERED,
    FORCED,
    LONGEST_MATCH,
    NO_DRAFT,
    OF_OTHERS,
    Draft,
    kinds_behind,
)
from penjing.serve.speculate.forced import ForcedDrafter
from penjing.serve.speculate.lookup import LookupDrafter
from penjing.serve.speculate.told import APART, MOST_TOKENS, PIECE, Telling, Told
from tests.serve.speculate.searched import find_by_search


def test_what_followed_the_same_tokens_before_is_guessed() -> None:
    assert LookupDrafter([5, 6, 7, 8, 9, 5, 6]).draft(3) == Draft([7, 8, 9], [2, 3, 4])


def test_the_longest_match_is_taken_and_of_equals_the_latest() -> None:
    assert LookupDrafter([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]).draft(1) == Draft([9], [3])
    assert LookupDrafter([1, 2, 7, 1, 2, 8, 1, 2]).draft(1) == Draft([8], [DIFFERED + 1])


def test_where_no_pair_comes_back_a_single_token_tells_what_may_follow() -> None:
    assert LookupDrafter([4, 8, 7, 6, 4]).draft(3) == Draft([8, 7, 6], [1, 2, 3])
    assert LookupDrafter([1, 1]).draft(2) == Draft([1, 1], [1, 2])


def test_a_kind_tells_whether_other_matches_of_that_length_were_followed_by_the_same() -> None:
    assert LookupDrafter([4, 9, 4, 8, 7, 6, 4]).draft(3) == Draft([8, 7, 6], [DIFFERED, 2, 3])
    assert LookupDrafter([4, 8, 1, 4, 8, 7, 6, 4]).draft(2) == Draft([8, 7], [AGREED, 2])
    assert LookupDrafter([1, 2, 7, 0, 1, 2, 7, 9, 1, 2]).draft(2) == Draft([7, 9], [AGREED + 1, 3])
    assert LookupDrafter([5, 1, 2, 8, 1, 2, 7, 5, 1, 2]).draft(1) == Draft([8], [3]), "the other match is shorter"
    told = Told()
    told.add([4, 8, 1, 4, 8, 7])
    told.add([1, 2, 7, 0, 1, 2, 6])
    assert told.draft([4], 2) == Draft([8, 7], [OF_OTHERS + AGREED, OF_OTHERS + 2])
    assert told.draft([1, 2], 1) == Draft([6], [OF_OTHERS + DIFFERED + 1])


def test_an_answer_that_repeats_itself_is_guessed_to_go_on() -> None:
    assert LookupDrafter([1, 4, 5, 4, 5]).draft(5).token_ids == [4, 5, 4, 5, 4]
    assert LookupDrafter([3] * 20).draft(4) == Draft([3] * 4, [AGREED + 1, *[LONGEST_MATCH] * 3])
    assert LookupDrafter([7, 4, 5, 6, 4, 5, 6]).draft(8).token_ids == [4, 5, 6, 4, 5, 6, 4, 5]


def test_nothing_is_guessed_where_nothing_comes_back_or_nothing_is_wanted() -> None:
    for token_ids in ([1], [1, 2, 3]):
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
    length, place, others = find_by_search(ids, ids)
    if not length:
        return NO_DRAFT
    ids = list(ids)
    for i in range(most):
        ids.append(ids[place + i])
    return Draft(ids[-most:], kinds_behind(length, others, most))


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
        self.num_asked = 0

    def forced(self) -> list[int]:
        self.num_asked += 1
        return self._forced

    def num_allowed(self, token_ids: list[int]) -> int:
        return min(self._allowed, len(token_ids))


def test_what_a_form_forces_comes_first_and_what_it_forbids_is_not_guessed() -> None:
    lookup = LookupDrafter([5, 6, 7, 8, 9, 5, 6])
    assert ForcedDrafter([], cast(Any, Form([1, 2, 3], 0)), lookup).draft(2) == Draft([1, 2], [FORCED] * 2)
    assert ForcedDrafter([], cast(Any, Form([], 2)), lookup).draft(4) == Draft([7, 8], [2, 3])
    assert ForcedDrafter([], cast(Any, Form([], 0)), lookup).draft(4) == NO_DRAFT
    assert ForcedDrafter([], cast(Any, Form([1], 1)), lookup).draft(0) == NO_DRAFT


def test_what_is_left_of_forced_tokens_is_kept_and_not_asked_for_again() -> None:
    tokens, form = [5], Form([1, 2, 3, 4], 0)
    drafter = ForcedDrafter(tokens, cast(Any, form), LookupDrafter(tokens))
    assert drafter.draft(2).token_ids == [1, 2]
    tokens += [1, 2]
    assert drafter.draft(9).token_ids == [3, 4]
    assert form.num_asked == 1
    tokens += [3, 4]
    assert drafter.draft(9).token_ids == [1, 2, 3, 4], "all of it came, so that the form says what follows"
    tokens += [1, 7]
    assert drafter.draft(9).token_ids == [1, 2, 3, 4], "it was cut into other tokens"
    assert form.num_asked == 3


def test_random_tokens_are_hardly_guessed() -> None:
    random = Random(0)
    tokens = [random.randrange(50_000) for _ in range(2000)]
    assert LookupDrafter(tokens).draft(8) == NO_DRAFT


def test_what_other_answers_said_is_guessed_and_nothing_of_their_prompts() -> None:
    told = Told()
    other = [1, 2, 3, 4, 5, 6, 7]
    Telling(told, other, 3).tell()
    assert told.draft([9, 4, 5], 4) == Draft([6, 7], [OF_OTHERS + 2, OF_OTHERS + 3])
    for unknown in ([1], [2, 3], [8, 9], [7]):
        assert told.draft(unknown, 4) == NO_DRAFT
    told.clear()
    assert told.draft([9, 4, 5], 4) == NO_DRAFT


def test_the_longest_match_of_both_lists_is_taken_and_old_answers_are_dropped() -> None:
    told = Told()
    told.add([1, 2, 3, 4])
    told.add([50] * MOST_TOKENS)
    told.add([9, 3, 8])
    assert told.draft([1, 2, 3], 2) == Draft([4], [OF_OTHERS + 3]), "the older list has more of it"
    assert told.draft([7, 3], 2) == Draft([8], [OF_OTHERS + 1]), "of equals the younger one"
    told.add([60] * MOST_TOKENS)
    told.add([0])
    assert told.draft([1, 2], 2) == NO_DRAFT


def test_an_answer_tells_in_pieces_and_each_token_once() -> None:
    told, ids = Told(), [100, 101]
    telling = Telling(told, ids, 2)
    reader = Telling(told, [5, 6], 2)
    for token_id in range(PIECE - 1):
        ids.append(token_id)
        assert telling.draft(4) == NO_DRAFT
    assert reader.draft(2) == NO_DRAFT
    ids.append(PIECE - 1)
    telling.draft(4)
    assert reader.draft(2) == Draft([7, 8], [OF_OTHERS + 2, OF_OTHERS + 3])
    ids += [PIECE, PIECE + 1]
    telling.tell()
    telling.tell()
    assert told.draft([PIECE - 2, PIECE - 1], 9).token_ids == [PIECE, PIECE + 1], "across pieces"
    assert told.draft([PIECE], 9).token_ids == [PIECE + 1]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=12), st.lists(st.integers(0, 3), min_size=1)
)
def test_what_others_told_is_found_as_by_search(answers: list[list[int]], asked: list[int]) -> None:
    told, ids = Told(), list[int]()
    for answer in answers:
        told.add(answer)
        ids += [*answer, APART]
        told.draft(asked, 1)
    length, place, others = find_by_search(ids, asked)
    guessed = ids[place : ids.index(APART, place)][:5] if length else []
    assert told.draft(asked, 5) == (
        Draft(guessed, kinds_behind(length, others, len(guessed), OF_OTHERS)) if length else NO_DRAFT
    )
