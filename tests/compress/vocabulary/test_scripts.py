"""Writing systems of tokens."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from penjing.compress.vocabulary.scripts import foreign_tokens, scripts_of
from penjing.compress.vocabulary.staying import staying
from penjing.core.errors import ConfigError
from penjing.core.text.byte_pairs import read_pairs
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.vocabulary.tokenizers_of import byte_fallback, byte_level

WORDS = ["the", "é", "’s", "42", "слово", "語", "λόγος", "e\u0301", "ы!", "한"]


@pytest.mark.parametrize(
    ("text", "scripts"),
    [
        ("naïve café’s 42!", {"LATIN"}),
        ("слово и λόγος", {"CYRILLIC", "GREEK"}),
        ("語のテスト", {"CJK", "HIRAGANA", "KATAKANA"}),
        ("का", {"DEVANAGARI"}),
        ("e\u0301 5 µm…🙂", {"LATIN"}),
        ("", set()),
    ],
)
def test_systems_of_texts(text: str, scripts: set[str]) -> None:
    assert scripts_of(text) == scripts


def test_tokens_of_other_systems() -> None:
    backend = Backend(models.BPE({word: number for number, word in enumerate(WORDS)}, []))
    backend.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = Tokenizer(backend)
    latin = foreign_tokens(tokenizer, ["Latin"])
    assert {WORDS[number] for number in latin} == {"слово", "語", "λόγος", "ы!", "한"}
    assert {WORDS[number] for number in foreign_tokens(tokenizer, ["latin", "cyrillic"])} == {"語", "λόγος", "한"}
    assert foreign_tokens(tokenizer, []) == frozenset()
    with pytest.raises(ConfigError, match="--script klingon: no letter's name"):
        foreign_tokens(tokenizer, ["klingon"])


@pytest.mark.parametrize("text", [byte_level(), byte_fallback()])
def test_they_leave_before_others(text: str) -> None:
    pairs = read_pairs(json.loads(text), "tokenizer.json")
    room = len(pairs.ids) - 60
    plain, _ = staying(pairs, room, {}, "tokenizer.json")
    # of the tokens that would stay some that nothing else is made of
    parts = {part for pair in pairs.places for part in pair}
    ends = [token for token in sorted(plain - pairs.fixed) if token not in parts and len(token) > 1][:20]
    assert len(ends) == 20
    kept, _ = staying(pairs, room, {}, "tokenizer.json", [pairs.ids[token] for token in ends])
    assert not kept & set(ends)
    assert len(kept) >= room - 2
    used, _ = staying(pairs, room, {ends[0]: 1}, "tokenizer.json", [pairs.ids[token] for token in ends])
    assert ends[0] in used
