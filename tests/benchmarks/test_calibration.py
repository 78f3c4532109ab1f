"""Rows of how long calibration takes: the steps are told apart, and the load of the machine stands beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import run_calibration
from lib.rows import read


def test_steps_are_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(run_calibration.time, "monotonic", lambda: now[0])
    timed = run_calibration.Timed()
    for task, seconds in (("layers", 2.0), ("head", 5.0), ("layers", 1.0)):
        now[0] += seconds
        timed.start(task, 1)
    now[0] += 0.5
    timed.close()
    assert timed.seconds == {"reading the text": 2.0, "layers": 5.5, "head": 1.0}


def test_a_run_leaves_rows_with_threads_and_load(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run_calibration.py", "--threads", "1", "--model", str(tiny_checkpoint), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(run_calibration, "SHORT", 0.0)
    assert run_calibration.main() == 0
    rows = {row.metric: row for row in read("calibration", tmp_path)}
    clock, processor = rows["smollm2-int8/clock"], rows["smollm2-int8/processor"]
    assert clock.value is not None
    assert clock.ratio == pytest.approx(clock.value / run_calibration.GOAL, rel=1e-3)
    assert processor.value
    parts = [row.value for name, row in rows.items() if name.split("/")[1] not in ("clock", "processor")]
    assert sum(value for value in parts if value) == pytest.approx(clock.value, rel=0.1)
    assert clock.versions["threads"] == "1"
    assert float(clock.versions["load before"]) >= 0
