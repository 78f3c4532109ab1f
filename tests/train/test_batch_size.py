"""How a step is cut: evenly where a run begins, somehow where one goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.errors import ConfigError
from penjing.train.batch_size import Cut, recut, repeats


def test_a_batch_that_does_not_divide_is_refused() -> None:
    message = r"batch_size=10 is not a multiple of data.micro_batch=4 × 2 processes; take 8"
    with pytest.raises(ConfigError, match=message):
        Cut(10, 2, 4).check()
    assert Cut(8, 2, 2).check().accumulation == 2


@given(batch=st.integers(1, 600), shares=st.integers(1, 40), largest=st.integers(1, 64), multiple=st.integers(1, 4))
def test_a_run_goes_on_with_any_number_of_processes(batch: int, shares: int, largest: int, multiple: int) -> None:
    cut = recut(batch, shares, largest, multiple)
    assert 1 <= cut.micro_batch <= largest
    share = -(-batch // shares)
    assert cut.filled - batch < shares * cut.accumulation  # less than a row of each micro-batch
    if multiple == 1:
        assert cut.accumulation == -(-share // min(largest, share))  # as few as the largest allows
    if share % largest == 0 and share // largest % multiple == 0:
        assert cut.micro_batch == largest


def test_what_is_filled_up_is_said() -> None:
    assert str(recut(8, 3, 4)) == "batch 8 = 3 × 3 × 1 accumulated less 1"
    assert str(recut(12, 3, 2)) == "batch 12 = 3 × 2 × 2 accumulated"


def test_a_batch_that_repeats_samples_is_told() -> None:
    assert repeats(8, 8) == repeats(8, None) == ""
    assert "more than the 1,200 samples that there are: every update sees each of them 2.5 times" in repeats(3000, 1200)
