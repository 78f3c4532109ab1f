"""The engine's log probabilities as OpenAI writes them: one form for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penjing.core.text.detokenizer import IncrementalDetokenizer

Entry = dict[str, dict[str, Any]]
"""By token id, the token itself first: `logprob`, `rank`, `decoded_token`."""


class TextOffsets:
    """Where tokens begin in the text that they make, in characters; one within a character begins where that does.

    Args:
        detokenizer: None adds up the tokens' own texts, in which such a one has a character of its own.
        at: characters before the first token.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer | None, at: int = 0) -> None:
        self._detokenizer, self._at = detokenizer, at

    def push(self, token_id: int, text: str) -> int:
        """Where the next token begins, whose own text is given."""
        begin = self._at
        piece = text if self._detokenizer is None else self._detokenizer.push(token_id)
        self._at += len(piece)
        return self._at - len(text) if "�" not in text and piece.endswith(text) else begin


def of_chat(entries: Sequence[Entry], count: int) -> dict[str, Any]:
    """Of a chat's tokens, each with the `count` most likely ones."""
    content = []
    for entry in entries:
        first = next(iter(entry.values()))
        content.append(_token(first) | {"top_logprobs": [_token(other) for other in _likely(entry, count)]})
    return {"content": content, "refusal": None}


def of_completion(
    entries: Sequence[Entry | None], count: int, offsets: Sequence[int], first: str = ""
) -> dict[str, Any]:
    """Of a completion's tokens.

    Args:
        entries: None is a prompt's first token, which has no probability; its text is `first`.
        count: so many of the most likely tokens come with each.
        offsets: where each token begins in the text.
    """
    tokens, values, likely = [], [], []
    for entry in entries:
        chosen = None if entry is None else next(iter(entry.values()))
        text = first if chosen is None else chosen["decoded_token"]
        tokens.append(text)
        values.append(None if chosen is None else chosen["logprob"])
        # The token itself is always there, as with OpenAI: whoever scores a text looks it up.
        shown = [] if entry is None or chosen is None else [*_likely(entry, count), chosen]
        likely.append({other["decoded_token"]: other["logprob"] for other in shown} if shown and count else None)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likely, "text_offset": list(offsets)}


def _likely(entry: Entry, count: int) -> list[dict[str, Any]]:
    return sorted((each for each in entry.values() if each["rank"] <= count), key=lambda each: each["rank"])


def _token(value: dict[str, Any]) -> dict[str, Any]:
    text = value["decoded_token"]
    # Half a character is shown as U+FFFD, whose bytes are not the token's.
    return {"token": text, "logprob": value["logprob"], "bytes": None if "�" in text else list(text.encode())}
