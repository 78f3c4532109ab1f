"""Calls of tools in a chat: the text that a model writes them as, and OpenAI's objects."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from penjing.core.text.tool_words import CALL_BEGIN, CALL_END

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
"""What stands before a call's arguments; a call of another form waits for its end."""


_NAME = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
"""What stands before a value in an object."""
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)

Part = str | dict[str, Any]
"""Of an answer: text to show; or a call, a complete one or what is new of it, as OpenAI's streams have it."""


class CallReader:
    """Takes one answer's text as it comes apart into what is said and what is called.

    Text that could still become the beginning of a call is held back.

    Args:
        partial: a call comes as it is written: its name first, then its arguments piece by piece. Else nothing is shown
            of it until it is complete.
    """

    def __init__(self, *, partial: bool = False) -> None:
        self._partial = partial
        self._arguments: _ObjectEnd | None = None  # of a call that is being shown
        self._text = ""
        self._calling = False
        self._blank: str | None = None  # directly behind a call: what came there that is only blank
        self.num_calls = 0
        self.is_cut = False
        """Of an answer that has ended: the last call that was shown has only the beginning of its arguments."""

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """New text; what it makes complete, in its order. `last`: none comes after it."""
        self._text += text
        parts: list[Part] = []
        while True:
            if self._calling and self._partial and self._shows(parts):
                if self._calling:
                    break
                continue
            if self._calling:
                if (end := _call_end(self._text, last)) is None:
                    break
                body, rest = self._text[:end], self._text[end + len(CALL_END) :]
                call = _call(body, self.num_calls)
                if call is None:
                    self._say(parts, CALL_BEGIN + body + CALL_END)
                else:
                    self._call(parts, call)
                self._text, self._calling = rest, False
                continue
            before, mark, rest = self._text.partition(CALL_BEGIN)
            if not mark:
                break
            self._say(parts, before)
            self._text, self._calling = rest, True
        if last and self._arguments is not None:  # half of the call has been shown: more there is not
            self.is_cut = not self._arguments.found
            self._text, self._calling, self._arguments = "", False, None
        elif last:  # a call that was cut off is text, which the client may look at
            call = _unmarked(self._text, self.num_calls) if self._calling else None
            if call is None:
                self._say(parts, CALL_BEGIN + self._text if self._calling else self._text)
            else:
                self._call(parts, call)
            self._text, self._calling = "", False
        elif not self._calling:
            held = _held_back(self._text)
            self._say(parts, self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
        return parts

    def _shows(self, parts: list[Part]) -> bool:
        """Add to `parts` what is new of a call whose arguments have begun; whether they have."""
        if self._arguments is None:
            head = _HEAD.match(self._text)
            name = None if head is None else _text_of(head[1])
            if head is None or name is None:
                return False
            self._call(parts, _begun(self.num_calls, name))
            self._arguments, self._text = _ObjectEnd(), self._text[head.end() :]
        length = self._arguments.find(self._text)
        if length:
            grown = parts[-1] if parts else None
            if not isinstance(grown, dict) or grown["index"] != self.num_calls - 1:
                grown = {"index": self.num_calls - 1, "function": {"arguments": ""}}
                parts.append(grown)
            grown["function"]["arguments"] += self._text[:length]
            self._text = self._text[length:]
        if self._arguments.found:
            _, mark, rest = self._text.partition(CALL_END)
            if mark:
                self._text, self._calling, self._arguments = rest, False, None
        return True

    def _say(self, parts: list[Part], text: str) -> None:
        """Add text to show. Line breaks behind a call are shown once more text comes: before another call, and at the
        end, they are none of the answer's words."""
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip() else text
        if self._blank is None and text:
            if parts and isinstance(parts[-1], str):
                parts[-1] += text
            else:
                parts.append(text)

    def _call(self, parts: list[Part], call: dict[str, Any]) -> None:
        parts.append(call)
        self.num_calls += 1
        self._blank = ""


def apart(parts: Sequence[Part]) -> tuple[str, list[dict[str, Any]]]:
    """The text and the calls of an answer whose form keeps them apart, as a chat's does."""
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if not isinstance(part, str)]


class _ObjectEnd:
    """Looks for the end of a JSON object in text that comes in pieces, each of which is seen once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._escaped = False
        self.found = False

    def find(self, text: str) -> int:
        """How many characters at the beginning of `text` belong to the object."""
        for place, letter in enumerate(text):
            if self.found:
                return place
            if self._in_text:
                self._in_text = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                self.found = self._depth == 0
        return len(text)


def _call_end(text: str, last: bool) -> int | None:
    """Where the mark that ends a call stands; None where it has not come. One inside of a JSON text ends nothing, but
    where this is the `last` text and no other one has come: what a model writes need not be JSON.

    It reads from the call's beginning each time, which costs only a call that cannot come piece by piece.
    """
    start = text.find("{")
    first = text.find(CALL_END)
    if first < 0:
        return None
    if not 0 <= start < first:
        return first
    body = _ObjectEnd()
    length = start + body.find(text[start:])
    if body.found:
        end = text.find(CALL_END, length)
        return None if end < 0 else end
    return first if last else None


def _unmarked(text: str, index: int) -> dict[str, Any] | None:
    """A call that is complete but for the mark behind it, of which some may be there."""
    start, body = text.find("{"), _ObjectEnd()
    end = max(start, 0) + body.find(text[max(start, 0) :])
    return _call(text[:end], index) if body.found and CALL_END.startswith(text[end:].strip()) else None


def _held_back(text: str) -> int:
    """Characters at the end of `text` that a call may begin with; so are the line breaks before it."""
    for length in range(min(len(text), len(CALL_BEGIN) - 1), 0, -1):
        if CALL_BEGIN.startswith(text[-length:]):
            return length
    return 0


def _call(body: str, index: int) -> dict[str, Any] | None:
    try:
        value = from_json(body.strip(), allow_inf_nan=False)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return _begun(index, value["name"], _source(body, "arguments") or "{}")


def _source(text: str, name: str) -> str | None:
    """How the value of `name` is written in `text`, an object in JSON: read and written again, numbers would lose
    digits. Of several values the last one counts."""
    found, place = None, text.index("{") + 1
    while (entry := _NAME.match(text, place)) is not None:
        _, place = _DECODER.raw_decode(text, entry.end())
        if _text_of(entry[1]) == name:
            found = text[entry.end() : place]
    return found


def _begun(index: int, name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _text_of(literal: str) -> str | None:
    """What a JSON text says; None if it is none."""
    try:
        return from_json(literal)
    except ValueError:
        return None
