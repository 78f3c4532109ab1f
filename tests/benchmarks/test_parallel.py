"""The planner's benchmark on a tiny pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lib import parallel_computed as bench
from lib.parallel_commands import compare
from lib.parallel_ranks import run_ranks, settled


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


def test_a_running_pipeline_resizes_itself_and_its_bubble_shrinks():
    job = {
        "kind": "pipeline", "rates": (0.01, 0.01), "fixed": 0.1, "micro_batch": 6, "micro_batches": 2, "steps": 6,
        "parallel": {"pp": 2, "balance": True},
    }  # fmt: skip
    found = run_ranks(2, job)
    assert found["micro_batch"][:2] == [6, 6]  # one step to try shapes out, one to see
    assert found["micro_batch"][-1] < 6
    assert settled(found["bubble"]) < found["bubble"][1]
    assert settled(found["seconds"]) < found["seconds"][1]


@pytest.mark.full  # four processes; what is packed has tests of its own
def test_a_quarter_of_the_bytes_leaves_with_8_bits():
    plain, packed = (
        run_ranks(2, {"kind": "traffic", "parallel": {"zero": 2, "gradients": way}})["bytes"]
        for way in ("float32", "int8")
    )
    assert 0.25 <= packed / plain < 0.26


def test_curves_are_compared_with_the_first(tmp_path: Path):
    runs = {"one process": [3.0, 2.0], "eight": [3.5, 1.75]}
    for name, losses in runs.items():
        records = [{"step": step + 1, "loss": loss} for step, loss in enumerate(losses)]
        records[-1]["eval/loss"] = losses[-1] + 1
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    figure = tmp_path / "figure.svg"
    first, second, *differences = compare({name: tmp_path / name for name in runs}, figure)
    assert (first.value, second.value, second.baseline) == (3.0, 2.75, "one process")
    assert [row.value for row in differences] == pytest.approx([-0.25, 0.125, 0.5])
    assert "eight" in figure.read_text()
