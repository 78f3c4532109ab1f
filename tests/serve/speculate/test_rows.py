"""How many guesses are checked: what pays by the table of costs and the shares that came true."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.speculate.acceptance import Acceptance, Shares
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
    acceptance = Acceptance(common)
    draft = Draft([1, 2, 3, 4], [4, 5, 6, 7])
    for _ in range(10):
        acceptance.observe(draft, [9])
    assert share_rows([acceptance.chances(draft)], 1, COSTS) == [0]
    for _ in range(20):
        acceptance.observe(draft, [1, 2, 3, 4])
    assert share_rows([acceptance.chances(draft)], 1, COSTS) == [4]


def test_guesses_that_hardly_come_are_not_weighed() -> None:
    acceptance = Acceptance(Shares())
    chances = acceptance.chances(Draft([1] * 16, [1] * 16))
    assert len(chances) == 1
    assert len(acceptance.chances(Draft([1] * 16, [8] * 16))) == 16


def test_a_new_answer_begins_with_what_became_of_the_others() -> None:
    common = Shares()
    old = Acceptance(common)
    draft = Draft([1], [2])
    before = Acceptance(common).chances(draft)[0]
    for _ in range(50):
        old.observe(draft, [1])
    assert Acceptance(common).chances(draft)[0] > 0.8 > before


def test_nothing_follows_from_guesses_behind_a_miss_or_beyond_the_end() -> None:
    common = Shares()
    acceptance = Acceptance(common)
    acceptance.observe(Draft([1, 2, 3], [2, 3, 4]), [9, 2, 3])
    acceptance.observe(Draft([1, 2, 3], [2, 3, 4]), [])
    untouched = Acceptance(Shares())
    for kind in range(3, NUM_KINDS):
        assert acceptance.chances(Draft([0], [kind])) == untouched.chances(Draft([0], [kind]))
    assert acceptance.chances(Draft([0], [2])) < untouched.chances(Draft([0], [2]))
    assert acceptance.chances(Draft([0], [FORCED]))[0] > 0.8
