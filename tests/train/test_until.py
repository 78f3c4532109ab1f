"""A run that pauses, and goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

from penjing.train.run import train


def test_a_paused_run_goes_on_to_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"output={tmp_path}/whole"])
    paused = train(recipe, until=3)
    assert not (tmp_path / "out").exists()
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records) == 3
    judged = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert judged == [paused["loss"]]  # step 3 is none that evaluation.every names
    assert train(recipe, resume="auto", until=3) == paused
    assert train(recipe, resume="auto", until=100) == whole
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()
