"""Rows of smaller decoders: paired with the checkpoint on each text, and timed in turns with it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from run_prune_decoder import HEALS, ROOT, VARIANTS, decode_row, healing, rise_rows, size_rows

from penjing.compress.measure.evaluate import EvaluateSettings, Quality, perplexity
from penjing.compress.recipe import load_recipe
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.train import TrainedStep
from penjing.core.config import read_recipe


def quality(name: str, losses: list[float]) -> Quality:
    return perplexity({name: losses}, EvaluateSettings())


def test_every_variant_is_a_prune_step_of_a_recipe(tiny_checkpoint: Path) -> None:
    steps = []
    for recipe, settings in VARIANTS.values():
        step = load_recipe(ROOT / "recipes" / f"{recipe}.toml", [f"model={tiny_checkpoint}"]).steps[0]
        steps.append(Prune.model_validate(step.model_dump() | settings))
    assert len({step.model_dump_json() for step in steps}) == len(VARIANTS)


@pytest.mark.parametrize("name", HEALS)
def test_every_healing_is_a_step_of_a_recipe(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    values = read_recipe(ROOT / "recipes" / "smollm2-pruned.toml", [])
    options = {"model": tiny_checkpoint, "precision": "bf16", "peak": 3e-4, "steps": 4}
    step = healing(values["steps"][-1], Namespace(**options, heal=name, texts_of_its_own=tmp_path))
    last = load_recipe(values | {"model": tiny_checkpoint, "steps": [step]}).steps[-1]
    assert isinstance(last, TrainedStep)
    assert (last.steps, last.sources, last.precision.mode) == (4, ("builtin:calibration", str(tmp_path)), "bf16")


def test_rises_are_paired_and_the_worst_is_the_largest() -> None:
    losses = {"news": [1.0, 4.0], "essays": [2.5, 2.5]}
    before = {name: quality(name, each) for name, each in losses.items()}
    after = {"news": quality("news", [1.1, 4.1]), "essays": quality("essays", [2.5, 2.52])}
    rows = {row.metric: row.value for row in rise_rows("channels/removed", before, after, {})}
    assert rows["channels/removed/news_rise"] == pytest.approx(10.517, abs=0.01)
    assert rows["channels/removed/news_rise_low"] == pytest.approx(10.517, abs=0.01)  # the same in every window
    assert rows["channels/removed/essays_rise"] == pytest.approx(1.005, abs=0.01)
    assert rows["channels/removed/worst_rise"] == rows["channels/removed/news_rise"]


def test_sizes_and_speeds_stand_beside_the_checkpoints(tiny_checkpoint: Path) -> None:
    first, second = size_rows("channels", {"parameters": {"before": 100, "after": 80}, "seconds": 2.0})
    assert (first.ratio, second.value) == (0.8, 2.0)
    row = decode_row("channels/removed", [tiny_checkpoint, tiny_checkpoint], 1)
    assert row.metric == "channels/removed/decode"
    assert row.value is not None
    assert row.value > 0
    assert row.ratio is not None
