"""Texts of a table reach a graph that takes tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import penjing
from penjing.core.errors import InputError
from penjing.core.graph.config import TensorSpec
from penjing.core.imports.graph import GraphOptions, import_graph
from penjing.core.text.network_inputs import roles_of, texts_of
from penjing.train.sources.open import open_source
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import SourceSettings

WORDS = ("[PAD]", "small", "trees", "grow", "slowly", "in", "pots")
SHAPE = ("batch", "length")
IDS, MASK = (
    TensorSpec(name="input_ids", dtype="int64", shape=SHAPE),
    TensorSpec(name="attention_mask", dtype="int64", shape=SHAPE),
)
ROWS = [
    {"text": "small trees", "label": 1},
    {"text": "trees grow slowly in pots", "label": 0},
    {"text": "grow", "label": 1},
]


def tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> Path:
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def table(path: Path, rows: list[dict[str, object]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reader(path: Path, folder: Path, inputs: tuple[TensorSpec, ...] = (IDS, MASK), **settings: object) -> Reader:
    said = SourceSettings.model_validate({"source": str(path), "max_broken": 0.5, **settings})
    form = Form(inputs, classes=2, texts=texts_of(folder, inputs))
    source = open_source(said)
    return Reader(source, np.arange(source.size), form, said, lambda _: None)


def test_texts_become_ids_with_a_mask_to_the_longest_of_a_batch(tmp_path: Path) -> None:
    read = reader(table(tmp_path / "a.jsonl"), tokenizer(tmp_path))
    inputs, targets = read.batch([0, 1])
    assert inputs["input_ids"].tolist() == [[1, 2, 0, 0, 0], [2, 3, 4, 5, 6]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1] * 5]
    assert targets.tolist() == [1, 0]
    assert read.batch([2])[0]["input_ids"].tolist() == [[3]]


def test_what_stands_beside_ids_and_a_length_that_is_fixed(tmp_path: Path) -> None:
    names = ("input_ids", "token_type_ids", "position_ids")
    inputs = tuple(TensorSpec(name=name, dtype="int32", shape=("batch", 4)) for name in names)
    found, _ = reader(table(tmp_path / "a.jsonl"), tokenizer(tmp_path), inputs).batch([0, 1])
    assert found["input_ids"].tolist() == [[1, 2, 0, 0], [2, 3, 4, 5]]
    assert found["token_type_ids"].tolist() == [[0] * 4] * 2
    assert found["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert found["input_ids"].dtype == np.int32
    cut, _ = reader(tmp_path / "a.jsonl", tmp_path, text_tokens=2).batch([1])
    assert cut["input_ids"].tolist() == [[2, 3]]


def test_which_inputs_are_tokens() -> None:
    image = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 8, 8))
    assert roles_of((image,)) is None
    assert roles_of((IDS, IDS.model_copy(update={"name": "decoder_input_ids"}))) is None
    assert roles_of((IDS, MASK)) == {"input_ids": "ids", "attention_mask": "mask"}


def test_a_text_that_is_none_is_left_out_and_a_network_without_a_tokenizer_refuses(tmp_path: Path) -> None:
    rows = [*ROWS, {"text": "  ", "label": 0}, {"text": 3, "label": 0}]
    read = reader(table(tmp_path / "a.jsonl", rows), tokenizer(tmp_path))
    assert len(read.batch(range(5))[0]["input_ids"]) == 5
    assert set(read.broken.values()) == {"column 'text' holds no text", "column 'text' holds no text but int"}
    with pytest.raises(InputError, match="no tokenizer; import one that takes tokens with --tokenizer"):
        reader(table(tmp_path / "a.jsonl"), tmp_path / "elsewhere").batch([0])


def test_the_column_is_found_or_named(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl", [{"image": "a.png", "text": "small"}, {"image": "b.png", "text": "trees"}])
    named = open_source(SourceSettings(source=str(path), text_column="text"))
    assert [named.load(index) for index in range(2)] == ["small", "trees"]
    assert named.digest(0) != named.digest(1)
    with pytest.raises(InputError, match="give one, for images or for texts"):
        open_source(SourceSettings(source=str(path), text_column="text", column="image"))
    with pytest.raises(InputError, match="no column 'poem'"):
        open_source(SourceSettings(source=str(path), text_column="poem"))


class Tagger(nn.Module):
    """(batch, length) ids → (batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.hidden, self.last = nn.Embedding(len(WORDS), 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.last(torch.relu(self.hidden(self.embedding(input_ids).mean(1))))


def test_a_graph_keeps_its_tokenizer_through_every_step(tmp_path: Path) -> None:
    path = table(tmp_path / "a.jsonl", 8 * ROWS)
    net = penjing.Network.from_torch(
        Tagger(),
        torch.randint(7, (2, 5)),
        dynamic={"input_ids": {0: "batch", 1: "length"}},
        tokenizer=tokenizer(tmp_path),
    )
    small = net.prune(0.25, method="taylor", data=path, sections={"data": {"held_out": 0.0}})
    small.distill(net, data=path, steps=2, batch_size=4)
    int8 = small.quantize(path)
    kept = int8.save(tmp_path / "int8")
    assert (kept / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert "distill: 2 updates" in small.report()


def test_a_tokenizer_of_another_network_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom tests.train.sources.test_texts import Tagger\n"
        "def build(): return Tagger(), torch.zeros(2, 5, dtype=torch.int64)\n"
    )
    many = tokenizer(tmp_path / "many", (*WORDS, "and", "more"))
    with pytest.raises(InputError, match="a token 8, the network's embedding only 7 rows"):
        import_graph(f"{tmp_path}/net.py:build", tmp_path / "out", GraphOptions(tokenizer=many))
    with pytest.raises(InputError, match=r"there is no tokenizer\.json"):
        import_graph(f"{tmp_path}/net.py:build", tmp_path / "out", GraphOptions(tokenizer=tmp_path / "none"))
    import_graph(f"{tmp_path}/net.py:build", tmp_path / "out", GraphOptions(tokenizer=tokenizer(tmp_path / "own")))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
