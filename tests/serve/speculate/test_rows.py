"""How many guesses are checked: what pays by the table of costs and the shares that came true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.speculate import acceptance
from penjing.serve.speculate.acceptance import SUREST, Acceptance, Shares
from penjing.serve.speculate.drafter import FORCED, NUM_KINDS, Draft
from penjing.serve.speculate.rows import HURDLE, StepCosts, share_rows

# One stream and sixteen as docs/log has them.
COSTS = StepCosts({1: 1.0, 5: 1.25, 9: 1.6, 16: 2.6, 32: 4.2})


def test_costs_lie_on_lines_and_go_on_beyond_the_last() -> None:
    assert COSTS.of(1) == 1.0
    assert COSTS.of(3) == pytest.approx(1.125)
    assert COSTS.of(9) == 1.6
    assert COSTS.of(48) == pytest.approx(5.8)


def test_fewer_rows_never_cost_more_since_noise_only_adds() -> None:
    assert StepCosts({1: 1.0, 2: 0.9, 4: 1.2}).seconds == [0.9, 0.9, 1.2]
    assert StepCosts({1: 0.0, 2: 0.0}).of(1) > 0


def test_sure_guesses_are_checked_and_unlikely_ones_are_not() -> None:
    assert share_rows([[0.95**i for i in range(1, 9)]], 1, COSTS) == [8]
    assert share_rows([[0.05, 0.01]], 1, COSTS) == [0]
    assert share_rows([[]], 1, COSTS) == [0]


def test_rows_go_to_the_answers_whose_guesses_are_likeliest() -> None:
    counts = share_rows([[0.9, 0.8, 0.7], [0.1, 0.01], []], 3, COSTS)
    assert counts == [3, 0, 0]


def test_at_a_steep_price_nothing_is_checked() -> None:
    assert share_rows([[0.99, 0.98]], 1, StepCosts({1: 1.0, 2: 2.0, 4: 4.0})) == [0]


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=5),
    st.lists(st.floats(0.5, 10), min_size=2, max_size=6),
)
def test_what_is_checked_pays_by_the_table(shares: list[list[float]], prices: list[float]) -> None:
    costs = StepCosts({1 + 3 * i: price for i, price in enumerate(prices)})
    chances = [[min(row[: i + 1]) ** (i + 1) for i in range(len(row))] for row in shares]
    counts = share_rows(chances, len(chances), costs)
    assert all(0 <= count <= len(row) for count, row in zip(counts, chances, strict=True))
    if sum(counts):
        tokens = len(chances) + sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        rate = tokens / costs.of(len(chances) + sum(counts))
        assert rate > HURDLE * len(chances) / costs.of(len(chances))
        assert len(chances) + sum(counts) <= costs.most_rows


def test_a_drafter_that_fails_is_left_out_soon_and_comes_back_when_it_hits() -> None:
    common = Shares()
    writing = Acceptance(common)
    draft = Draft([1, 2, 3, 4], [4, 5, 6, 7])
    for _ in range(10):
        writing.observe(0, draft, [9])
    assert share_rows([writing.chances(0, draft)], 1, COSTS) == [0]
    for _ in range(20):
        writing.observe(0, draft, [1, 2, 3, 4])
    assert share_rows([writing.chances(0, draft)], 1, COSTS) == [4]


def test_guesses_that_hardly_come_are_not_weighed() -> None:
    writing = Acceptance(Shares())
    chances = writing.chances(0, Draft([1] * 16, [1] * 16))
    assert chances == pytest.approx([0.3, 0.3**2, 0.3**3])
    assert len(writing.chances(0, Draft([1] * 16, [8] * 16))) == 16


def test_a_new_answer_begins_with_what_became_of_the_others() -> None:
    common = Shares()
    old = Acceptance(common)
    draft = Draft([1], [2])
    before = Acceptance(common).chances(0, draft)[0]
    for _ in range(50):
        old.observe(0, draft, [1])
    assert Acceptance(common).chances(0, draft)[0] > 0.8 > before


def test_nothing_follows_from_guesses_behind_a_miss_or_beyond_the_end() -> None:
    common = Shares()
    writing = Acceptance(common)
    writing.observe(0, Draft([1, 2, 3], [2, 3, 4]), [9, 2, 3])
    writing.observe(0, Draft([1, 2, 3], [2, 3, 4]), [])
    untouched = Acceptance(Shares())
    for kind in range(3, NUM_KINDS):
        assert writing.chances(7, Draft([0], [kind])) == untouched.chances(7, Draft([0], [kind]))
    assert writing.chances(7, Draft([0], [2])) < untouched.chances(7, Draft([0], [2]))
    assert writing.chances(7, Draft([0], [FORCED]))[0] > 0.8


def test_tokens_tell_where_guesses_of_a_kind_come_oftener() -> None:
    common = Shares()
    writing = Acceptance(common)
    for _ in range(20):  # of the same kind: 3 comes behind 2, and nothing that is guessed behind 9
        writing.observe(2, Draft([3], [5]), [3])
        writing.observe(9, Draft([4], [5]), [5])

    def chance(before: int, guessed: int) -> float:
        (found,) = Acceptance(common).chances(before, Draft([guessed], [5]))
        return found

    assert chance(2, 3) > chance(2, 0) > chance(0, 0) > chance(9, 0) > chance(9, 4)
    assert chance(2, 3) <= SUREST
    common.forget_tokens()
    assert chance(2, 3) == chance(9, 4)


def test_tokens_that_are_told_apart_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MOST_TOKENS", 10)
    common = Shares()
    for before, guessed in [(0, token_id) for token_id in range(100)] + [(token_id, 0) for token_id in range(100)]:
        Acceptance(common).observe(before, Draft([guessed], [1]), [guessed])
        assert len(common.of) <= 11
        assert len(common.behind) <= 11


@given(
    st.lists(st.floats(0.5, 10), min_size=2, max_size=6),
    st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=5),
)
def test_guesses_below_the_least_chance_would_not_be_checked(prices: list[float], shares: list[list[float]]) -> None:
    costs = StepCosts({1 + 3 * i: price for i, price in enumerate(prices)})
    chances = [[min(row[: i + 1]) ** (i + 1) for i in range(len(row))] for row in shares]
    least = costs.least_chance(len(chances)) * (1 - 1e-9)
    likely = [[chance for chance in row if chance >= least] for row in chances]
    assert share_rows(likely, len(chances), costs) == share_rows(chances, len(chances), costs)


def test_the_least_chance_is_what_the_cheapest_further_row_asks() -> None:
    assert COSTS.least_chance(1) == pytest.approx(HURDLE * 0.25 / 4)
    assert COSTS.least_chance(16) == pytest.approx(HURDLE * 16 / 2.6 * 0.1)
    assert COSTS.least_chance(32) == 1.0
    assert COSTS.least_chance(99) == 1.0
