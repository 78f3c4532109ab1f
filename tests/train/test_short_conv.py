"""Decoders with short convolutions learn as others do, whole or by adapters, and what they learnt is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.serve.generate import generate_stream
from penjing.serve.sampling.params import SamplingParams
from penjing.train.run import train
from tests.serve.tiny import ids_of

CONVOLUTIONS = [
    'model.model_type="penjing"',
    'model.layer_types=["short_conv", "full_attention"]',
    "model.num_hidden_layers=3",
    "model.conv_taps=3",
    "model.qk_norm=true",
]
Losses = Callable[[Path], dict[int, float]]


def check_answers(folder: Path) -> None:
    """The engine's greedy answer is the likeliest token each time."""
    loaded = load_model(folder)
    text = "The import statement"
    made = ids_of(list(generate_stream(folder, text, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))))
    ids = loaded.tokenizer.encode(text)
    with torch.inference_mode():
        for token in made:
            assert int(loaded.model(torch.tensor(ids))[-1].argmax()) == token
            ids.append(token)


@pytest.mark.parametrize(
    "changes",
    [
        ["steps=40", "learning_rate.peak=0.01"],
        ["precision.mode=hybrid", "memory.recompute=full"],
        ["optimizer.name=muon", "precision.mode=bf16", "memory.recompute=selective"],
    ],
    ids=["float32", "hybrid, recomputed", "muon, bf16"],
)
def test_a_recipe_trains_one(recipe: Path, tmp_path: Path, losses: Losses, changes: list[str]) -> None:
    train(recipe, [*CONVOLUTIONS, *changes])
    curve = losses(tmp_path / "out-run")
    assert curve[max(curve)] < curve[1]
    config = open_checkpoint(tmp_path / "out").config
    assert config.layer_types == ("short_conv", "full_attention", "short_conv")
    check_answers(tmp_path / "out")


def test_adapters_learn_beside_one(recipe: Path, tmp_path: Path) -> None:
    train(recipe, CONVOLUTIONS)
    further = [f"initial={tmp_path}/out", f"output={tmp_path}/next", "adapter.rank=2", "steps=3"]
    train(recipe, [*CONVOLUTIONS, *further])
    before, after = (open_checkpoint(tmp_path / name) for name in ("out", "next"))
    for name in before.tensor_names:
        assert torch.equal(before.get(name), after.get(name)) == ("_proj" not in name), name
    check_answers(tmp_path / "next")
