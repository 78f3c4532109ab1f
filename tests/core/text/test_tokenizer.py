"""The tokenizer's own behaviour: special tokens, where ids come from, damaged files."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer

from penjing.core.errors import InputError
from penjing.core.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))


def test_control_tokens_can_be_ordinary_text(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    assert 2 in tokenizer.encode(text)
    plain = tokenizer.encode(text, allow_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "ab"
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    assert 2 in tokenizer.encode(text)  # the setting of one call does not stay


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    """With Python's lock held the longest pause would be the whole time."""
    text, span = "the quick brown fox " * 15_000, []

    def encode() -> None:
        span.append(time.perf_counter())
        tokenizer.encode_beside(text)
        span.append(time.perf_counter())

    thread = threading.Thread(target=encode)
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < 0.7 * (span[1] - span[0])
    assert tokenizer.encode_beside("a tree<|im_end|>") == tokenizer.encode("a tree<|im_end|>")


def test_no_text_has_fewer_tokens_than_its_bytes_say(tokenizer: Tokenizer) -> None:
    longest = max((tokenizer.decode([token], skip_special=False) for token in range(49152)), key=len)
    for text in (longest * 50, "<|im_start|>" * 50, "é" * 50):
        assert len(text.encode()) <= tokenizer.most_bytes(len(tokenizer.encode(text)))
    assert tokenizer.most_bytes(100) == 100 * len(longest), "the bound is met"


def test_properties(tokenizer: Tokenizer, smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.vocab_size == len(theirs) == 49152
    assert tokenizer.special_ids == set(theirs.all_special_ids) | set(range(17))
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.token_to_id("<|im_start|>") == 1
    assert tokenizer.id_to_token(1) == "<|im_start|>"
    assert tokenizer.id_to_token(60_000) is None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 70_000), max_size=30))
def test_decode_of_any_ids_equals_transformers(ids: list[int], smollm2: Path) -> None:
    ours, theirs = _loaded(smollm2)
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == expected


def test_stops_come_from_every_file(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[5, 2])
    edit(folder / "config.json", eos_token_id=7)
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
    assert Tokenizer.from_folder(folder).eos_token_ids == (7, 5, 2, 0)


def test_begin_of_text_of_the_config_when_the_tokenizer_has_none(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", bos_token=None)
    edit(folder / "config.json", bos_token_id=9)
    assert Tokenizer.from_folder(folder).bos_token_id == 9


def test_truncation_and_padding_in_the_file_are_ignored(folder: Path) -> None:
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 10},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "<|im_end|>",
        },
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("abcd")) == 4
    assert len(tokenizer.encode("<|im_end|>bcd", allow_special=False)) > 4


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": "1.0"}', '{"model": {"type": "Magic"}}'])
def test_malformed_tokenizer(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("stop", [99_999, -1, "two", 2.5, [[2]], {"id": 2}, True])
def test_ids_that_are_no_ids(folder: Path, stop: Any) -> None:
    edit(folder / "config.json", eos_token_id=stop)
    with pytest.raises(InputError, match=r"is not in tokenizer\.json"):
        Tokenizer.from_folder(folder)


_cache: dict[Path, tuple[Tokenizer, Any]] = {}


def _loaded(folder: Path) -> tuple[Tokenizer, Any]:
    if folder not in _cache:
        _cache[folder] = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    return _cache[folder]


@pytest.mark.parametrize("template", ["<|im_start|> $A <|im_end|>", "$A <|im_end|>", "<|im_start|> $A", "$A"])
def test_what_goes_on_has_no_end_before_it(template: str, smollm2: Path) -> None:
    """Of a tokenizer that ends every text, a choice began behind the end of its context, whose length was counted with
    it: the likelihood was that of the end of the whole, and not of the choice's first token."""
    backend = Backend.from_file(str(smollm2 / "tokenizer.json"))
    ends = [(token, backend.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")]
    plain = backend.encode("Who asks?").ids
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    made = Tokenizer(backend)
    begin = [ends[0][1]] if "start" in template else []
    for text, ids in (("Who asks?", plain), ("", [])):
        assert made.encode(text) == made.encode_beside(text) == made.encode(text, allow_special=False) == begin + ids
        assert made.encode(text, add_special=False) == ids
    assert made.encode("a<|im_end|>")[-1] == ends[1][1]  # it is said
