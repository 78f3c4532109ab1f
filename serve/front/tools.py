"""Calls of tools in a chat: the text that a model writes them as, and OpenAI's objects."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from penjing.serve.sampling.guided import CALL_BEGIN, CALL_END


@dataclass
class Piece:
    """What new text is: text to show, and calls that are complete."""

    text: str
    calls: list[dict[str, Any]]


class CallReader:
    """Takes one answer's text as it comes apart into what is said and what is called.

    Text that could still become the beginning of a call is held back; of a call nothing is shown until it is complete,
    since a client can do nothing with half of one.
    """

    def __init__(self) -> None:
        self._text = ""
        self._calling = False
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> Piece:
        """New text; what it makes complete. `last`: none comes after it."""
        self._text += text
        piece = Piece("", [])
        while True:
            if self._calling:
                body, mark, rest = self._text.partition(CALL_END)
                if not mark:
                    break
                call = _call(body, self.num_calls)
                if call is None:
                    piece.text += CALL_BEGIN + body + CALL_END
                else:
                    piece.calls.append(call)
                    self.num_calls += 1
                self._text, self._calling = rest, False
                continue
            before, mark, rest = self._text.partition(CALL_BEGIN)
            if not mark:
                break
            piece.text += self._said(before)
            self._text, self._calling = rest, True
        if last:  # a call that was cut off is text, which the client may look at
            piece.text += CALL_BEGIN + self._text if self._calling else self._said(self._text)
            self._text, self._calling = "", False
        elif not self._calling:
            held = _held_back(self._text)
            piece.text += self._said(self._text[: len(self._text) - held])
            self._text = self._text[len(self._text) - held :]
        return piece

    def _said(self, text: str) -> str:
        """`text` to show; line breaks between calls are not."""
        return "" if self.num_calls and not text.strip() else text


def _held_back(text: str) -> int:
    """Characters at the end of `text` that a call may begin with; so are the line breaks before it."""
    for length in range(min(len(text), len(CALL_BEGIN) - 1), 0, -1):
        if CALL_BEGIN.startswith(text[-length:]):
            return length
    return 0


def _call(body: str, index: int) -> dict[str, Any] | None:
    try:
        value = from_json(body.strip())
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = json.dumps(value.get("arguments", {}), ensure_ascii=False)
    function = {"name": value["name"], "arguments": arguments}
    return {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
