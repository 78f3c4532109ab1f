"""A run that learns from its own answers is killed while it samples, rewards, learns, evaluates or saves: resumed, it
says and does what a run does that was left alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.forking import Forked
from tests.train.align.killed import PHASES
from tests.train.align.test_rollouts import recipe  # noqa: F401  # a fixture

SETTINGS = [
    "steps=4", "algorithm.updates=2", "checkpoint.every=1", "evaluation.every=2", "evaluation.samples=3",
    "alarms.patience=2",
]  # fmt: skip
CLOCK = {"step_s", "mfu", "io_wait", "rollout_share", "memory_bytes", "memory_share"}


def told(run: Path) -> list[dict[str, Any]]:
    """The records of a run, without what the clock says and without that it was resumed."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name not in CLOCK and not name.endswith("_per_s")}
        for record in found
        if "recovered_s" not in record
    ]


def test_after_a_kill_in_any_phase_every_number_is_the_same(recipe: Path, tmp_path: Path) -> None:  # noqa: F811
    command = [sys.executable, "-m", "tests.train.align.killed", str(recipe), str(tmp_path), *SETTINGS]
    assert Forked(command, cwd=Path(__file__).parents[3]).wait(240) == 0
    records, weights = told(tmp_path / "whole-run"), load_file(tmp_path / "whole/model.safetensors")
    answers = (tmp_path / "whole-run/answers.jsonl").read_text()
    assert sum("alarm" in record for record in records) == 1  # one that counts records across the kill
    assert [json.loads(line)["step"] for line in answers.splitlines()] == [2, 2, 2, 4, 4, 4]
    for name in PHASES:
        assert told(tmp_path / f"{name}-run") == records, name
        assert (tmp_path / f"{name}-run/answers.jsonl").read_text() == answers, name
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(bool((found[key] == weights[key]).all()) for key in weights), name
        assert list((tmp_path / f"{name}-run/checkpoints").glob(".step-*")) == [], name
