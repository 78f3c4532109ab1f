"""Samples that a function yields: DataLoaders, what differs from call to call, and what never ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penjing.core.errors import InputError
from penjing.core.graph.config import TensorSpec
from penjing.train.sources import tensors
from penjing.train.sources.open import open_source
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.tensors import calling_once

FUNCTIONS = """
import torch

def loader(*shapes):
    values = [torch.arange(12.0).reshape(6, 2) + number for number in range(len(shapes) + 1)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*values, torch.arange(6) % 3), batch_size=4)

def two():
    return loader(1)

def regression():
    rows = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6))
    return torch.utils.data.DataLoader(rows, batch_size=4)

class Rows(torch.utils.data.Dataset):
    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return 6

    def __getitem__(self, row):
        return self.inputs(torch.full((2,), float(row))), row % 3

def named():
    return torch.utils.data.DataLoader(Rows(lambda row: {"y": row + 1, "x": row}), batch_size=2)

def nested():
    return torch.utils.data.DataLoader(Rows(lambda row: (row, row + 1)), batch_size=2)

def random():
    for _ in range(4):
        yield torch.randn(8, 2), torch.randint(3, (8,))

def endless():
    while True:
        yield torch.zeros(1000, 1000)
"""
X, Y = (TensorSpec(name=name, dtype="float32", shape=("batch", 2)) for name in "xy")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


def reader(spec: str, *inputs: TensorSpec, **values: Any) -> Reader:
    settings = SourceSettings.model_validate({"source": spec, **values})
    source = open_source(settings)
    return Reader(source, np.arange(source.size), Form(inputs, classes=3), settings, [].append)


def test_the_batches_of_a_data_loader_end_with_their_labels(mine: Path) -> None:
    inputs, targets = reader(f"{mine}:loader", X).batch([4, 5])
    assert list(inputs) == ["x"]
    assert inputs["x"].tolist() == [[8, 9], [10, 11]]
    assert targets.tolist() == [1, 2]
    inputs, targets = reader(f"{mine}:two", X, Y).batch([4])
    assert {name: value.tolist() for name, value in inputs.items()} == {"x": [[8, 9]], "y": [[9, 10]]}
    assert targets.tolist() == [1]
    assert reader(f"{mine}:two", X, Y, labels=False).targets is None


@pytest.mark.parametrize("name", ["named", "nested"])
def test_a_data_loader_pairs_several_inputs_with_their_labels(mine: Path, name: str) -> None:
    inputs, targets = reader(f"{mine}:{name}", X, Y).batch([4])
    assert {name: value.tolist() for name, value in inputs.items()} == {"x": [[4, 4]], "y": [[5, 5]]}
    assert targets.tolist() == [1]


def test_targets_of_a_data_loader_that_are_no_classes_are_refused(mine: Path) -> None:
    with pytest.raises(InputError, match=r"labels are float32\[6\], not one whole number a row.*data.labels = false"):
        reader(f"{mine}:regression", X)
    assert list(reader(f"{mine}:regression", X, labels=False).batch([0])[0]) == ["x"]


def test_a_function_is_called_once_where_steps_are_compared(mine: Path) -> None:
    settings = SourceSettings(source=f"{mine}:random")
    with calling_once():
        one, other = open_source(settings), open_source(SourceSettings(source=f"{mine}:random", labels=False))
    assert [one.digest(index) for index in range(32)] == [other.digest(index) for index in range(32)]
    assert one.labels is not None
    assert other.labels is None
    one, other = open_source(settings), open_source(settings)
    assert [one.digest(index) for index in range(32)] != [other.digest(index) for index in range(32)]


def test_samples_without_an_end_do_not_fill_the_memory(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "available_bytes", lambda: 36_000_000)
    with pytest.raises(InputError, match=r"has yielded 4000 samples of 16.* and goes on; .*let it end sooner"):
        open_source(SourceSettings(source=f"{mine}:endless"))
