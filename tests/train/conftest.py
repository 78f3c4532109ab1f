"""Small things to train: token shards, a recipe, a stream of given batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.core.progress import Silent
from penjing.train.data.pack import pack
from penjing.train.objective.objective import IGNORED, Batch

RECIPE = """
output = "{folder}/out"
steps = 8
seed = 3
device = "cpu"

[model]
architecture = "decoder"
vocab_size = 320
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 64
tie_word_embeddings = true

[data]
kind = "text"
shards = "{shards}"
sequence_length = 24
batch_size = 8

[evaluation]
every = 4
samples = 6

[checkpoint]
every = 2

[monitor]
every = 1
tensorboard = false
"""


class ListStream:
    """Repeats given batches for ever."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches = list(batches)
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.position += 1
        return self.batches[(self.position - 1) % len(self.batches)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def token_batch(rows: int, length: int, seed: int, vocab: int = 320, ragged: bool = False) -> Batch:
    """Random tokens; with `ragged`, row i keeps only its first length - 3·i targets (at least one)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if ragged:
        for row in range(rows):
            targets[row, max(length - 3 * row - seed % 3, 1) :] = IGNORED
    return {"tokens": tokens[:, :-1].contiguous(), "targets": targets}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a few help topics, with a tokenizer of 320 tokens."""
    from pydoc_data.topics import topics

    texts = tmp_path_factory.mktemp("texts")
    for name in sorted(topics)[:30]:
        (texts / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    folder = tmp_path_factory.mktemp("shards")
    pack(folder, (str(texts),), 320, held_out=0.2, tokenizer=None, progress=Silent())
    return folder


@pytest.fixture
def recipe(tmp_path: Path, shards: Path) -> Path:
    """A recipe of eight quick steps; it writes to `tmp_path`/out and `tmp_path`/out-run."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path, shards=shards))
    return path


@pytest.fixture
def losses() -> Callable[[Path], dict[int, float]]:
    """Step → loss of a run's metrics.jsonl."""
    import json

    def read(run: Path) -> dict[int, float]:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    return read
