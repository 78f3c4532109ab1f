"""Which tokens stay, and what the library that encodes makes of the vocabulary that is left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from penjing.compress.vocabulary.staying import staying
from penjing.compress.vocabulary.tokenizer import smaller_tokenizer
from penjing.core.errors import InputError
from penjing.core.text.byte_pairs import read_pairs
from penjing.core.text.corpus import heldout_text
from tests.compress.vocabulary.tokenizers_of import byte_fallback, byte_level

KINDS = [byte_level, byte_fallback]
WORDS = heldout_text()[:20_000].split(" ")


def smaller(text: str, room: int, used: Mapping[str, int] | None = None) -> tuple[dict[str, Any], dict[int, int]]:
    """(`tokenizer.json` with `room` tokens at most, old id → new id)."""
    whole = json.loads(text)
    pairs = read_pairs(whole, "tokenizer.json")
    kept, joined = staying(pairs, room, used or {}, "tokenizer.json")
    numbers = {old: new for new, old in enumerate(sorted(pairs.ids[token] for token in kept))}
    return smaller_tokenizer(whole, kept, joined, numbers, "tokenizer.json"), numbers


def encoder(values: dict[str, Any]) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_str(json.dumps(values))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_texts_are_read_back_and_those_of_tokens_that_stay_keep_them(kind: Callable[[], str], data: Any) -> None:
    whole = json.loads(kind())
    room = data.draw(st.integers(280, len(whole["model"]["vocab"])), "room")
    small, numbers = smaller(kind(), room)
    assert len(small["model"]["vocab"]) <= room
    assert sorted(small["model"]["vocab"].values()) == list(range(len(small["model"]["vocab"])))
    before, after = encoder(whole), encoder(small)
    text = " ".join(data.draw(st.lists(st.sampled_from(WORDS), max_size=20), "words")) + data.draw(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=5), "rare characters"
    )
    assert Tokenizer.from_str(json.dumps(small)).decode(after(text)) == text
    old = before(text)
    if all(number in numbers for number in old):
        assert after(text) == [numbers[number] for number in old]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_that_stays_is_made(kind: Callable[[], str]) -> None:
    small, _ = smaller(kind(), 350)
    encode = encoder(small)
    vocabulary = small["model"]["vocab"]
    joined = {left + right for left, right in small["model"]["merges"]}
    decoder = Tokenizer.from_str(json.dumps(small))
    assert len(joined) == len(small["model"]["merges"]) > 0
    assert all(encode(decoder.decode([vocabulary[token]])) == [vocabulary[token]] for token in joined)


def test_what_is_learnt_last_leaves_first_and_what_texts_use_stays() -> None:
    whole = json.loads(byte_level())
    last = "".join(whole["model"]["merges"][-1])
    plain, _ = smaller(byte_level(), 400)
    assert last not in plain["model"]["vocab"]
    learnt_first = ["".join(pair) for pair in whole["model"]["merges"][:40]]
    assert plain["model"]["vocab"].keys() >= set(learnt_first)
    used, _ = smaller(byte_level(), 400, {last: 1})
    assert last in used["model"]["vocab"]


def test_reserved_tokens_leave_before_any_other_unless_they_have_a_use() -> None:
    size = len(json.loads(byte_level())["model"]["vocab"])
    small, _ = smaller(byte_level(), size - 1)
    assert [token["content"] for token in small["added_tokens"]] == ["<|start|>", "<|end|>", "<unused0>"]
    ids = json.loads(byte_level())["model"]["vocab"]
    assert read_pairs(json.loads(byte_level()), "t", said="say <unused1>").spare == {"<unused0>"}
    named = read_pairs(json.loads(byte_level()), "t", named=[ids["<unused1>"], max(ids.values())])
    assert named.spare == {"<unused0>"}
    assert named.fixed >= {"<unused1>", max(ids, key=ids.__getitem__)}


def test_post_processors_write_the_new_ids() -> None:
    small, numbers = smaller(byte_fallback(), 400)
    start = json.loads(byte_fallback())["model"]["vocab"]["<|start|>"]
    assert Tokenizer.from_str(json.dumps(small)).encode("of").ids[0] == numbers[start]


def test_texts_are_filled_up_with_the_same_token() -> None:
    _, numbers = smaller(byte_fallback(), 400)
    filler = next(old for old, new in numbers.items() if old != new)
    whole = Tokenizer.from_str(byte_fallback())
    whole.enable_padding(pad_id=filler)
    small, _ = smaller(whole.to_str(), 400)
    rows = Tokenizer.from_str(json.dumps(small)).encode_batch(["a", "a longer text"])
    assert rows[0].ids[-1] == numbers[filler]


def test_characters_leave_where_bytes_spell_them() -> None:
    whole = json.loads(byte_fallback())
    small, _ = smaller(byte_fallback(), 280)
    letters = [token for token in whole["model"]["vocab"] if len(token) == 1]
    assert len([token for token in letters if token in small["model"]["vocab"]]) < len(letters)
    assert len([token for token in small["model"]["vocab"] if token.startswith("<0x")]) == 256


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "a vocabulary of kind 'Unigram' has no pairs"),
        ({"model": None}, "a vocabulary of kind None has no pairs"),
        ({"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}}, "is no tokenizer"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}, "is no tokenizer"),
        ({"added_tokens": [{}]}, "is no tokenizer"),
        ({"added_tokens": [{"content": "!", "id": 0}]}, "the token '!' has two ids"),
        ({"added_tokens": [{"content": "<x>", "id": 600}, {"content": "<x>", "id": 601}]}, "'<x>' has two ids"),
        ({"model": {"merges": [], "continuing_subword_prefix": "##"}}, "a mark '##' inside words"),
    ],
)
def test_what_is_no_vocabulary_of_pairs_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_pairs(json.loads(byte_level()) | change, "tokenizer.json")


def test_too_little_room_is_refused() -> None:
    with pytest.raises(InputError, match=r"258 tokens cannot be spelled by others .* keep more"):
        smaller(byte_level(), 200)


def test_post_processors_of_other_kinds_are_refused() -> None:
    whole = json.loads(byte_level()) | {"post_processor": {"type": "Unheard"}}
    with pytest.raises(InputError, match="post-processor of kind 'Unheard'"):
        smaller(json.dumps(whole), 400)
