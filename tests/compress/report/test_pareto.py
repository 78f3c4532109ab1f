"""What is on the Pareto front."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penjing.compress.measure.evaluate import EvaluateSettings, accuracy
from penjing.compress.report.pareto import Point, front


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(pairs: list[tuple[int, int]]) -> None:
    settings = EvaluateSettings(resamples=100)
    points = [Point(str(i), x, accuracy(np.arange(10) < right, settings)) for i, (x, right) in enumerate(pairs)]
    along = front(points)
    assert along
    for point in points:
        rivals = [
            other
            for other in points
            if other.x <= point.x
            and other.quality.value >= point.quality.value
            and (other.x, other.quality.value) != (point.x, point.quality.value)
        ]
        same = [other for other in along if (other.x, other.quality.value) == (point.x, point.quality.value)]
        assert bool(same) == (not rivals)
