"""Turns tokens into text as they come: only whole characters are given out, and in total exactly the full decoding."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from penjing.core.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens.

    The pieces returned by `push` and `flush` concatenate to `tokenizer.decode(ids)`. With a prompt, they are what the
    ids add to it: a leading space that a tokenizer drops at the start of a text is kept in the middle of one.

    Args:
        skip_special: leave control tokens out.
        prompt_tail: the last tokens of the prompt (a few suffice), whose text is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, prompt_tail: Iterable[int] = ()) -> None:
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoding: _Decoding = (
            _ByteLevel(tokenizer) if _is_byte_level(tokenizer) else _Windowed(tokenizer, skip_special)
        )
        for token_id in prompt_tail:
            self.push(token_id)
        self._decoding.end_prompt()

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; "" while a character is incomplete."""
        return "" if token_id in self._skipped else self._decoding.push(token_id)

    def flush(self) -> str:
        """The rest, when no more tokens come: incomplete characters as U+FFFD."""
        return self._decoding.flush()


class _Decoding(Protocol):
    def push(self, token_id: int) -> str: ...

    def end_prompt(self) -> None: ...

    def flush(self) -> str: ...


class _ByteLevel:
    """Byte-level BPE: each token is a byte string of its own, so a streaming UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        return "" if token is None else self._decoder.decode(_token_bytes(token))

    def end_prompt(self) -> None:
        """Whole characters are out already; bytes of an incomplete one wait for the answer's."""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Windowed:
    """Any other decoder: decode the last settled tokens with and without the new ones, and take the difference.

    A run of byte tokens is held until it ends, because one wrong byte makes all of the run U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._settled: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self._settle(keep_incomplete=True)

    def end_prompt(self) -> None:
        """Byte tokens that end the prompt are its own text, unless they end inside a character."""
        self._settle(keep_incomplete=True)

    def flush(self) -> str:
        return self._settle(keep_incomplete=False)

    def _settle(self, keep_incomplete: bool) -> str:
        before = self._tokenizer.decode(self._settled, self._skip_special)
        after = self._tokenizer.decode(self._settled + self._pending, self._skip_special)
        text = after[len(before) :]
        if keep_incomplete and text.endswith("\ufffd"):
            return ""
        # without text, the settled tokens are still the start of what a decoder trims
        self._settled = self._pending if text else self._settled + self._pending
        self._pending = []
        return text


@lru_cache(maxsize=8)
def _is_byte_level(tokenizer: Tokenizer) -> bool:
    # The state of the decoder alone, in JSON; that of the whole tokenizer takes 100 ms at the first request.
    decoder = {} if tokenizer.backend.decoder is None else json.loads(tokenizer.backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    return [step.get("type") for step in steps] == ["ByteLevel"]


def _token_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one with other characters (an added token) is plain text."""
    if all(letter in _BYTE_OF_LETTER for letter in token):
        return bytes(_BYTE_OF_LETTER[letter] for letter in token)
    return token.encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 character stands for its byte, the others are numbered from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_alphabet()
