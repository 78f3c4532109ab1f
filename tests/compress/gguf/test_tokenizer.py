"""Tokenizers of every kind that comes in as GGUF go out again: our importer gives the same tokens for any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from penjing.compress.gguf.tokenizer import tokenizer_fields
from penjing.compress.gguf.write import write_gguf
from penjing.core.errors import InputError
from penjing.core.gguf.tokenizer import RULES, tokenizer_from_gguf
from penjing.core.imports.importer import import_model
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.gguf.artifacts import make_int8
from tests.conftest import tiny_config, tiny_tokenizer_fields
from tests.core.gguf.test_tokenizer import CONTROL, byte_level_fields, sentencepiece_fields
from tests.core.text.texts import real_texts, texts

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def write_folder(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, text in tokenizer_from_gguf(fields, "test").items():
        (folder / name).write_text(text)
    return folder


def again(folder: Path, out: Path, **config: Any) -> Tokenizer:
    """The tokenizer that comes back from the metadata of `folder`'s."""
    rows = Tokenizer.from_folder(folder).vocab_size
    fields = tokenizer_fields(folder, tiny_config(**({"vocab_size": rows} | config)))
    return Tokenizer.from_folder(write_folder(out, fields))


def same_on_any_text(ours: Tokenizer, back: Tokenizer, first: bool = False) -> None:
    """`first`: a space is put before a text only where there is none, which GGUF cannot say."""
    for text in (text.lstrip() for text in real_texts()[::8]):
        assert back.encode(text) == ours.encode(text)
        assert back.decode(ours.encode(text)) == ours.decode(ours.encode(text))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(texts(["<think>"]))
    def check(text: str) -> None:
        if not (first and text.startswith((" ", "▁"))):
            assert back.encode(text) == ours.encode(text)

    check()


@pytest.mark.parametrize("pre", RULES)
def test_byte_level_families(tmp_path: Path, pre: str) -> None:
    folder = write_folder(tmp_path / "folder", byte_level_fields(pre, BYTE_LEVEL))
    ours, back = Tokenizer.from_folder(folder), again(folder, tmp_path / "back")
    same_on_any_text(ours, back)
    text = f"a{CONTROL[1]}b<think>"
    assert back.encode(text) == ours.encode(text)
    assert back.special_ids == ours.special_ids
    assert (back.encode("a")[0] == 0) == (pre == "llama-bpe")  # begin-of-text, where the family puts it


SPELLINGS: dict[str, Any] = {
    "prepend": None,
    "replace": None,
    "first": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "never": pre_tokenizers.Metaspace(prepend_scheme="never", split=False),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_sentencepiece_in_its_spellings(tmp_path: Path, spelling: str) -> None:
    """Llama 2 as transformers wrote it first (Prepend and Replace), as it does now (Metaspace), and without the space
    before a text, as Gemma."""
    folder = write_folder(tmp_path / "folder", sentencepiece_fields(spelling in ("first", "prepend")))
    path = folder / "tokenizer.json"
    if SPELLINGS[spelling] is not None:
        backend = Backend.from_str(json.dumps(json.loads(path.read_text()) | {"normalizer": None}))
        backend.pre_tokenizer = SPELLINGS[spelling]
        backend.save(str(path))
    ours = Tokenizer.from_folder(folder)
    back = again(folder, tmp_path / "back", bos_token_id=1, eos_token_ids=(2,), pad_token_id=None)
    same_on_any_text(ours, back, first=spelling == "first")
    assert back.encode("a")[0] == ours.encode("a")[0] == 1


def test_ids_and_unused_rows(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", byte_level_fields("qwen2", BYTE_LEVEL))
    size = Tokenizer.from_folder(folder).vocab_size
    config = tiny_config(vocab_size=size + 3, bos_token_id=None, eos_token_ids=(2, 0, 1), pad_token_id=-1)
    fields = tokenizer_fields(folder, config)
    assert fields["tokenizer.ggml.tokens"][-3:] == [f"[PAD{size + index}]" for index in range(3)]
    assert fields["tokenizer.ggml.token_type"][-4:] == [4, 5, 5, 5]
    keys = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "padding_token_id")
    assert [fields.get(f"tokenizer.ggml.{key}") for key in keys] == [None, 2, 0, 1, None]
    assert not fields["tokenizer.ggml.add_bos_token"]


def test_a_file_of_bytes_without_merges_is_read(tmp_path: Path) -> None:
    """GGUF writers leave out an empty list, so the file has no merges at all."""
    known = tiny_tokenizer_fields()
    tokens = known["tokenizer.ggml.tokens"][:259]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 3 + [1] * 256}
    fields = {key: value for key, value in known.items() if key != "tokenizer.ggml.merges"} | fields
    folder = write_folder(tmp_path / "folder", fields)
    write_gguf(make_int8(tmp_path / "artifact", folder, vocab_size=259), tmp_path / "model.gguf", Silent())
    import_model(str(tmp_path / "model.gguf"), tmp_path / "back")
    text = "no merges: é\n"
    assert Tokenizer.from_folder(tmp_path / "back").encode(text) == Tokenizer.from_folder(folder).encode(text)
    with pytest.raises(InputError, match=r"merges is missing"):
        tokenizer_from_gguf({key: value for key, value in known.items() if "merges" not in key}, "model.gguf")


def test_what_gguf_has_no_rule_for_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", tiny_tokenizer_fields())
    whole = Backend.from_file(str(folder / "tokenizer.json"))

    def refused(message: str, backend: Backend = whole, **config: Any) -> None:
        backend.save(str(folder / "tokenizer.json"))
        with pytest.raises(InputError, match=message):
            tokenizer_fields(folder, tiny_config(**config))

    refused("the tokenizer has 320 tokens, the embedding 300 rows", vocab_size=300)
    refused("4 tokens that end a text; GGUF takes 3", eos_token_ids=(0, 1, 2, 3))
    split = Backend.from_str(whole.to_str())
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    refused(r"a BPE tokenizer that splits by \['Whitespace'\] is not written as GGUF", split)
    lower = Backend.from_str(whole.to_str())
    lower.normalizer = normalizers.Lowercase()
    refused("is not written as GGUF", lower)
    words = Backend(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.decoder = decoders.WordPiece()
    refused(r"a WordLevel tokenizer that splits by \[\]", words)
    begun = Backend.from_str(
        tokenizer_from_gguf(tiny_tokenizer_fields() | {"tokenizer.ggml.add_bos_token": True}, "")["tokenizer.json"]
    )
    refused(r"puts the tokens \[0\] and \[\] around a text, config.json says bos_token_id=1", begun, bos_token_id=1)
