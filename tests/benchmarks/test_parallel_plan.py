"""The planner's benchmark on a tiny pipeline."""

from __future__ import annotations

import run_parallel_plan as bench


def test_zero_rows_shrink():
    rows = {row.metric: row for row in bench.zero_rows(dp=64)}
    assert rows["zero_0_dp_64_model_state"].ratio is None
    assert (rows["zero_1_dp_64_model_state"].ratio or 1) < 0.35
    assert (rows["zero_3_dp_64_model_state"].ratio or 1) < 0.02
    assert (rows["zero_3_dp_64_rank"].ratio or 1) < 0.75


def test_bubbles_shrink_when_balanced():
    rows = bench.bubble_rows(4)
    before, split, after, step = rows[:4]
    assert before.value is not None
    assert split.value is not None
    assert after.value is not None
    assert after.value < split.value <= before.value
    assert (step.ratio or 1) < 1
    assert all(row.runs == 0 for row in rows)
