"""Rows of a whole training run, from what the run left behind."""

import json
from pathlib import Path

import pytest
from run_recipes import recipe_rows

from penjing.core.manifest import write_manifest

RECIPE = (Path(__file__).parents[2] / "recipes/decoder-tiny.toml").read_text()


def test_rows_of_a_run_that_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny-run.toml").write_text(RECIPE)
    output, run = Path("build/decoder-tiny"), Path("build/decoder-tiny-run")
    output.mkdir(parents=True)
    run.mkdir()
    (output / "config.json").write_text("{}")
    write_manifest(output, "checkpoint", {"evaluation": {"loss": 3.25}})
    lines = [{"step": 10 * k, "step_s": 0.5, "tokens_per_s": 100.0 * k, "memory_bytes": k} for k in (1, 2, 3)]
    lines.append({"step": 30, "eval/loss": 3.25})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = {row.metric: row.value for row in recipe_rows(Path("tiny-run.toml"), force=False)}
    assert values == {"tiny_run_held_out_loss": 3.25, "tiny_run_tokens_per_s": 200.0, "tiny_run_memory": 3}
