"""Windows of text begin as their tokenizer begins a text, and hold every token of it once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from penjing.core.errors import InputError
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.text.windows import text_room, text_windows
from tests.begun import with_ends


def tokenizer(begin: int) -> Tokenizer:
    """Of 100 tokens, which puts the first `begin` before every text."""
    backend = Backend(models.WordLevel({str(number): number for number in range(100)}, unk_token="0"))
    before = [(str(number), number) for number in range(begin)]
    if before:
        template = " ".join(token for token, _ in before) + " $A"
        backend.post_processor = processors.TemplateProcessing(template, special_tokens=before)
    return Tokenizer(backend)


@given(tokens=st.lists(st.integers(0, 99), max_size=60), window=st.integers(1, 9), begin=st.integers(0, 2))
def test_windows_are_the_text_behind_its_beginning(tokens: list[int], window: int, begin: int) -> None:
    made, before = tokenizer(begin), list(range(begin))
    if window <= begin:
        with pytest.raises(InputError, match=rf"a window of {window} tokens has no room for text behind the {begin}"):
            text_windows(made, tokens, window)
        return
    text = tokens[begin:] if tokens[:begin] == before else tokens
    rows = text_windows(made, tokens, window).tolist()
    assert len(rows) == len(text) // text_room(made, window)
    assert all(row[:begin] == before for row in rows)
    found = [token for row in rows for token in row[begin:]]
    assert found == text[: len(found)]


def test_a_text_that_its_tokenizer_has_begun_is_begun_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    made = Tokenizer.from_folder(with_ends(tiny_checkpoint, tmp_path / "begun", begins=True))
    assert len(made.begin) == 1
    text = "Windows begin as a text does, wherever they are cut."
    begun, plain = (text_windows(made, made.encode(text, add_special=add), 4) for add in (True, False))
    assert begun.tolist() == plain.tolist()
    assert begun[:, 0].tolist() == [made.begin[0]] * len(begun)
    assert made.begin[0] not in begun[:, 1:]
