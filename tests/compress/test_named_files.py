"""What a step or an evaluation reads from files that settings name is an input of the run: other content, another
result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.report.schema import read_report
from penjing.compress.run import run_recipe
from penjing.core.errors import InputError
from penjing.core.manifest import read_manifest
from tests.compress.graphs import graph_folder
from tests.compress.keys import result_key
from tests.core.graph.networks import Residual
from tests.serve.seeing import write_asked, write_seeing

QUICK = {
    "data": {"tokens": 256, "window": 64},
    "evaluate": {"prose_tokens": 128, "code_tokens": 0, "window": 64},
    "measure": {"rounds": 0},
    "guard": {"perplexity_ratio": 1e6},
}
TRAINED = {"kind": "finetune", "steps": 2, "batch_size": 2, "sequence_length": 16}


def test_other_text_is_learnt_from_anew(tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "mine/a.txt"
    text.parent.mkdir()
    text.write_text("zebras and yaks " * 400)
    steps = [TRAINED | {"sources": [str(text.parent)]}]
    recipe: dict[str, Any] = QUICK | {"model": str(tiny_checkpoint), "output": str(tmp_path / "out"), "steps": steps}
    first = read_manifest(run_recipe(recipe))
    assert read_manifest(run_recipe(recipe)) == first  # nothing changed: what is there is kept
    key = result_key(recipe, tmp_path)

    text.write_text("quite another text " * 400)
    assert result_key(recipe, tmp_path) != key
    with pytest.raises(InputError, match="force"):
        run_recipe(recipe)
    again = read_manifest(run_recipe(recipe, force=True))
    assert again.sha256["model.safetensors"] != first.sha256["model.safetensors"]


def test_other_pictures_are_learnt_from_anew(tmp_path: Path) -> None:
    folder = tmp_path / "seeing"
    folder.mkdir()
    write_seeing(folder, tied=True)
    write_asked(folder, "rows.jsonl", range(8))
    sources = {"sources": [str(folder / "rows.jsonl")], "images": str(folder)}
    recipe = QUICK | {"model": str(folder), "output": str(tmp_path / "out"), "steps": [TRAINED | sources]}
    key = result_key(recipe, tmp_path)
    assert result_key(recipe, tmp_path) == key
    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[0])
    picture = folder / row["images"][0]
    picture.write_bytes(picture.read_bytes() + b"\0")
    assert result_key(recipe, tmp_path) != key


def test_a_loss_of_the_users_and_scores_of_layers_are_told_by_their_files(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    network = graph_folder(tmp_path / "network", Residual(), torch.randn(4, 3, 16, 16), meaning="classes")
    mine, scores = tmp_path / "mine.py", tmp_path / "bits/sensitivity.json"
    mine.write_text("def loss(outputs, answers, targets): ...\n")
    scores.parent.mkdir()
    scores.write_text("{}")
    loss, sensitivity = f"{mine}:loss", {"effective_bits": 12, "sensitivity": str(scores.parent)}
    cases = [
        (mine, network, {"kind": "distill", "steps": 2, "teacher": str(network), "loss": loss}),
        (mine, network, {"kind": "quantize", "steps": 2, "loss": loss}),
        (scores, tiny_checkpoint, {"kind": "quantize", **sensitivity}),
    ]
    for file, model, step in cases:
        recipe = {"model": str(model), "output": str(tmp_path / "out"), "steps": [step]}
        key = result_key(recipe, tmp_path)
        assert result_key(recipe, tmp_path) == key
        file.write_text(file.read_text() + "\n")
        assert result_key(recipe, tmp_path) != key


def test_a_metric_of_the_users_that_changed_judges_anew(tmp_path: Path) -> None:
    network = graph_folder(tmp_path / "network", Residual(), torch.randn(4, 3, 16, 16), meaning="classes")
    mine = tmp_path / "mine.py"
    mine.write_text("def score(outputs, targets):\n    return [7.0] * len(outputs[0])\n")
    recipe = {
        "model": str(network), "output": str(tmp_path / "out"), "measure": {"rounds": 0},
        "evaluate": {"metric": f"{mine}:score"}, "steps": [{"kind": "prune", "ratio": 0.5}],
    }  # fmt: skip
    assert read_report(run_recipe(recipe)).last.quality.value == 7
    mine.write_text(mine.read_text().replace("7.0", "5.0"))
    with pytest.raises(InputError, match="force"):
        run_recipe(recipe)
    assert read_report(run_recipe(recipe, force=True)).last.quality.value == 5
