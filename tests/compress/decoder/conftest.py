"""Recipes that train, and a decoder that has learnt something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penjing.core.checkpoint.load import load_model
from tests.compress.decoder.language import learn

RECIPE = """
model = "{model}"
output = "{output}"
[evaluate]
prose_tokens = 128
code_tokens = 64
window = 64
resamples = 100
[data]
tokens = 256
window = 64
[measure]
rounds = 1
seconds = 0
prefill_tokens = 8
[guard]
perplexity_ratio = 2.0
[[steps]]
kind = "quantize"
steps = {steps}
batch_size = 8
sequence_length = 16
held_out = 0.2
sources = ["{texts}"]
device = "cpu"
evaluation_samples = 0
checkpoint_every = 4
learning_rate = {{ peak = 3e-5 }}
optimizer = {{ weight_decay = 0.0 }}
"""


@pytest.fixture
def write(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from pydoc_data.topics import topics

    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in sorted(topics)[:6]:
        (texts / f"{name}.txt").write_text(topics[name], encoding="utf-8")

    def make(name: str, steps: int, more: str = "") -> Path:
        path = tmp_path / f"{name}.toml"
        values = {"model": tiny_checkpoint, "output": tmp_path / name, "steps": steps, "texts": texts}
        path.write_text(RECIPE.format(**values) + more)
        return path

    return make


@pytest.fixture(scope="session")
def taught(tiny_checkpoint: Path) -> torch.nn.Module:
    """A decoder that has begun to learn the language. Read only; tests that take it are the group "taught"."""
    model = load_model(tiny_checkpoint).model.requires_grad_(True)
    learn(model, 60, 5e-3, lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
    return model.requires_grad_(False)
