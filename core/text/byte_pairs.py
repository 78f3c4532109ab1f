"""The vocabulary of byte-pair encoding: which pairs are joined to which tokens, and how a text is spelled by them.

Byte-pair encoding (https://arxiv.org/abs/1508.07909) joins the characters of a word pair by pair, the earliest learnt
pair first. The library `tokenizers` encodes; here is what it does not tell: what a token is made of.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penjing.core.errors import InputError

# Tokens in reserve, which no text has: Gemma's <unused7>, Llama's <|reserved_special_token_7|>.
SPARE = re.compile(r"<\|?(unused|reserved_special_token_)_?\d+\|?>")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte of a character that is no token
Pair = tuple[str, str]


@dataclass(frozen=True)
class Pairs:
    """The vocabulary of a `tokenizer.json`.

    Attributes:
        ids: token → its id, added ones too.
        places: pair → its place in the order of learning.
        fixed: tokens that no others can spell, or that are named elsewhere.
        spare: tokens that no text has.
        whole: words that are tokens are not joined from pairs (`ignore_merges`).
    """

    ids: Mapping[str, int]
    places: Mapping[Pair, int]
    fixed: frozenset[str]
    spare: frozenset[str]
    whole: bool

    def making(self, token: str) -> list[Pair] | None:
        """The pairs that are joined for the text of `token`, in their order; None where the end is not that token."""
        parts, joined = self._joined(token)
        return joined if len(parts) == 1 else None

    def spelled(self, text: str) -> list[str]:
        """The tokens of `text`, in the characters of the vocabulary and without a space before it, one or more."""
        parts, _ = self._joined(text)
        return [token for part in parts for token in ([part] if part in self.ids else _bytes(part))]

    def _joined(self, text: str) -> tuple[list[str], list[Pair]]:
        parts, joined = list(text), list[Pair]()
        while len(parts) > 1:
            places = [self.places.get(pair, len(self.places)) for pair in pairwise(parts)]
            first = min(places)
            if first == len(self.places):
                break
            at = places.index(first)
            joined.append((parts[at], parts[at + 1]))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts, joined


def _bytes(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def read_pairs(tokenizer: Mapping[str, Any], where: str, named: Collection[int] = (), said: str = "") -> Pairs:
    """The vocabulary of the parsed `tokenizer.json`.

    Args:
        named: ids that other files of the model name, whose tokens are fixed.
        said: what these files say; a token in reserve that is in it is none.

    Raises:
        InputError: it has no pairs (WordPiece and Unigram vocabularies), or is malformed.
    """
    model = tokenizer.get("model")
    if not isinstance(model, dict) or "merges" not in model:
        kind = model.get("type") if isinstance(model, dict) else None
        raise InputError(f"{where}: a vocabulary of kind {kind!r} has no pairs that spell a token; only BPE's has")
    if prefix := model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise InputError(f"{where}: tokens with a mark {prefix!r} inside words are not taken")
    try:
        ids = {str(token): int(number) for token, number in model["vocab"].items()}
        pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        places: dict[Pair, int] = {}
        for place, (left, right) in enumerate(pairs):
            places.setdefault((left, right), place)
        found = [(str(token["content"]), int(token["id"])) for token in tokenizer.get("added_tokens") or ()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} is no tokenizer ({type(error).__name__}: {error}); get or make it again") from None
    added = dict(found)
    every = ids | added
    if twice := [token for token, number in [*ids.items(), *found] if every[token] != number]:
        raise InputError(f"{where}: the token {twice[0]!r} has two ids; get or make the file again")
    needed = {token for token, number in every.items() if number in named}
    spare = frozenset(token for token in every.keys() - needed if SPARE.fullmatch(token) and token not in said)
    made = {left + right for left, right in places}
    basic = {token for token in ids if token not in made and token not in added}
    if model.get("byte_fallback"):  # any other character is spelled by its bytes
        basic = {token for token in basic if BYTE.fullmatch(token)}
    unknown = {token for token in (model.get("unk_token"),) if token in ids}
    fixed = frozenset((basic | added.keys() | unknown | needed) - spare)
    return Pairs(every, places, fixed, spare, bool(model.get("ignore_merges")))
