"""The engine's log probabilities as OpenAI writes them: one form for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Entry = dict[str, dict[str, Any]]
"""By token id, the token itself first: `logprob`, `rank`, `decoded_token`."""


def of_chat(entries: Sequence[Entry], count: int) -> dict[str, Any]:
    """Of a chat's tokens, each with the `count` most likely ones."""
    content = []
    for entry in entries:
        first = next(iter(entry.values()))
        content.append(_token(first) | {"top_logprobs": [_token(other) for other in _likely(entry, count)]})
    return {"content": content, "refusal": None}


def of_completion(entries: Sequence[Entry | None], count: int, offset: int, first: str = "") -> dict[str, Any]:
    """Of a completion's tokens.

    Args:
        entries: None is a prompt's first token, which has no probability; its text is `first`.
        count: so many of the most likely tokens come with each.
        offset: characters before the first token.
    """
    tokens, values, likely, offsets = [], [], [], []
    for entry in entries:
        chosen = None if entry is None else next(iter(entry.values()))
        text = first if chosen is None else chosen["decoded_token"]
        tokens.append(text)
        values.append(None if chosen is None else chosen["logprob"])
        # The token itself is always there, as with OpenAI: whoever scores a text looks it up.
        shown = [] if entry is None or chosen is None else [*_likely(entry, count), chosen]
        likely.append({other["decoded_token"]: other["logprob"] for other in shown} if shown and count else None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likely, "text_offset": offsets}


def _likely(entry: Entry, count: int) -> list[dict[str, Any]]:
    return sorted((each for each in entry.values() if each["rank"] <= count), key=lambda each: each["rank"])


def _token(value: dict[str, Any]) -> dict[str, Any]:
    text = value["decoded_token"]
    # Half a character is shown as U+FFFD, whose bytes are not the token's.
    return {"token": text, "logprob": value["logprob"], "bytes": None if "�" in text else list(text.encode())}
