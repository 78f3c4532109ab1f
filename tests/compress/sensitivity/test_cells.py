"""The time to go of many measurements of one kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penjing.compress.sensitivity import cells
from penjing.compress.sensitivity.cells import Remaining


def test_the_time_to_go_is_that_of_what_was_measured_now_and_never_below_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times: Iterator[float] = iter(range(0, 1000, 30))
    monkeypatch.setattr(cells.time, "monotonic", lambda: next(times))
    left = Remaining(3)
    said = [str(left)]
    for is_kept in (True, False, False, False):  # one more than was foreseen
        with left.timed(is_kept=is_kept):
            pass
        said.append(str(left))
    assert said == ["-:--", "-:--", "0:30", "0:00", "0:00"]
