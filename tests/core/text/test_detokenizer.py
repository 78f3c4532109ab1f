"""Streaming text: the pieces join to the full decoding, and no piece holds half a character."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from penjing.core.gguf.tokenizer import tokenizer_from_gguf
from penjing.core.text.detokenizer import IncrementalDetokenizer
from penjing.core.text.tokenizer import Tokenizer
from tests.conftest import tiny_tokenizer_fields
from tests.core.gguf.test_tokenizer import sentencepiece_fields
from tests.core.text.texts import texts

MANY = settings(max_examples=150, deadline=None, derandomize=True)


def byte_level() -> Tokenizer:
    fields = tiny_tokenizer_fields()
    # a control token, and added tokens whose letters are outside the byte alphabet
    fields["tokenizer.ggml.tokens"] += ["<｜end▁of▁sentence｜>", "two words", "été🌱"]
    fields["tokenizer.ggml.token_type"] += [3, 4, 4]
    return Tokenizer(Backend.from_str(tokenizer_from_gguf(fields, "test")["tokenizer.json"]))


def sentencepiece(prefix: bool) -> Tokenizer:
    files = tokenizer_from_gguf(sentencepiece_fields(prefix), "test")
    return Tokenizer(Backend.from_str(files["tokenizer.json"]))


def old_llama() -> Tokenizer:
    """With the single Metaspace decoder of older conversions."""
    tokenizer = sentencepiece(True)
    tokenizer.backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level,
    "sentencepiece": lambda: sentencepiece(True),
    "sentencepiece, no prefix": lambda: sentencepiece(False),
    "metaspace": old_llama,
}
NAMES = pytest.mark.parametrize("name", TOKENIZERS)


@cache
def made(name: str) -> Tokenizer:
    """Where a test runs, and not in each process that collects it."""
    return TOKENIZERS[name]()


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, prompt or [])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@NAMES
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_full_decoding_of_random_ids(name: str, skip: bool) -> None:
    """Random ids: control tokens, single bytes, wrong UTF-8, ids without a token."""
    tokenizer = made(name)
    special_or_byte = st.integers(0, 262)

    @MANY
    @given(st.lists(special_or_byte | st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    def check(ids: list[int]) -> None:
        assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)

    check()


@NAMES
def test_pieces_of_real_text_never_hold_half_a_character(name: str) -> None:
    tokenizer = made(name)

    @MANY
    @given(texts(["<|im_end|>", "</s>"]).filter(lambda text: "\ufffd" not in text))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special=False)
        whole = tokenizer.decode(ids)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in piece for piece in pieces)

    check()


@NAMES
def test_text_after_a_prompt_is_what_it_adds(name: str) -> None:
    tokenizer = made(name)

    @MANY
    @given(texts([]), texts([]))
    def check(prompt: str, answer: str) -> None:
        before = tokenizer.encode(prompt, add_special=False)
        ids = tokenizer.encode(answer, add_special=False)
        expected = tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
        if "\ufffd" not in tokenizer.decode(before) + expected:
            assert "".join(stream(tokenizer, ids, prompt=before)) == expected

    check()


def test_a_space_in_the_middle_of_a_text_is_kept() -> None:
    tokenizer = made("sentencepiece")
    ids = tokenizer.encode("the tree", add_special=False)
    assert "".join(stream(tokenizer, ids)) == "the tree"
    assert "".join(stream(tokenizer, ids, prompt=ids)) == " the tree"


@NAMES
def test_an_emoji_comes_out_whole(name: str) -> None:
    tokenizer = made(name)
    ids = tokenizer.encode("a 👨‍👩‍👧 b", add_special=False)
    pieces = [piece for piece in stream(tokenizer, ids) if piece]
    assert "".join(pieces) == "a 👨‍👩‍👧 b"
    assert len(pieces) > 2


def test_flush_gives_an_incomplete_character_once() -> None:
    tokenizer = made("byte-level")
    ids = tokenizer.encode("🌱x", add_special=False)[:-2]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * len(ids)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_smollm2_streams_its_own_vocabulary(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)

    @MANY
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30), st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)

    check()
