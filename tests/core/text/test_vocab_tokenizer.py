"""Tokenizers of two files against transformers', which reads them too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.text.vocab_tokenizer import tokenizer_from_vocab

TEXTS = [
    "Hello, world! It's 2026: 12345 trees.",
    "  two  spaces\n\n\tand tabs ",
    "naïve café 東京 🌲 ﬁne",
    "don't we'll I'm THEY'RE",
    "",
    "<|endoftext|>text</s>more<pad>",
    "def f(x):\n    return x ** 2  # squared",
]
OPT = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>"}
OPT |= {"unk_token": {"content": "</s>", "__type": "AddedToken"}, "pad_token": "<pad>", "add_prefix_space": False}


@pytest.fixture
def files(smollm2: Path, tmp_path: Path) -> Callable[..., Path]:
    """A folder with the vocabulary of a published tokenizer in GPT-2's two files, and settings."""

    def make(settings: dict[str, Any] | None) -> Path:
        folder = tmp_path / "old"
        folder.mkdir()
        model = json.loads((smollm2 / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder

    return make


@pytest.mark.parametrize("settings", [None, {}, {"add_prefix_space": True}, OPT], ids=["none", "empty", "space", "opt"])
def test_texts_are_split_as_transformers_splits_them(
    files: Callable[..., Path], settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = files(settings)
    reference = AutoTokenizer.from_pretrained(folder)
    text = tokenizer_from_vocab(folder)
    assert text is not None
    (folder / "tokenizer.json").write_text(text)
    ours = Tokenizer.from_folder(folder)
    for each in TEXTS:
        expected = reference(each)["input_ids"]
        assert ours.encode(each) == expected, each
        assert ours.decode(expected) == reference.decode(expected, skip_special_tokens=True)


def test_a_folder_with_the_two_files_is_imported(
    files: Callable[..., Path], make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    old, plain = files(OPT), make_tiny_checkpoint(vocab_size=49_154)
    for name in ("config.json", "model.safetensors"):
        (old / name).write_bytes((plain / name).read_bytes())
    out = import_model(str(old), tmp_path / "out")
    tokenizer = Tokenizer.from_folder(out)
    assert tokenizer.decode(tokenizer.encode("Hello 東京")) == "Hello 東京"
    assert tokenizer.encode("a")[0] == tokenizer.token_to_id("</s>")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", '{"a": 0, "b": 2}', "must number its tokens from 0 on"),
        ("vocab.json", '{"a": 0, "b": true}', "must number its tokens from 0 on"),
        ("vocab.json", "[]", r"vocab\.json"),
        ("merges.txt", "a b c\n", "holds 'a b c', not a pair"),
        ("merges.txt", "東 東京東\n", "are no tokenizer"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token must be a token"),
    ],
)
def test_damaged_files_are_named(files: Callable[..., Path], name: str, content: str, message: str) -> None:
    folder = files(OPT)
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=message):
        tokenizer_from_vocab(folder)


def test_bytes_that_are_no_text_and_another_rule(files: Callable[..., Path]) -> None:
    folder = files({"tokenizer_class": "Qwen2Tokenizer"})
    assert tokenizer_from_vocab(folder) is None, "it splits by another rule"
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "merges.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"merges\.txt is no text"):
        tokenizer_from_vocab(folder)
    (folder / "merges.txt").unlink()
    assert tokenizer_from_vocab(folder) is None
