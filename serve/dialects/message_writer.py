"""The answer of `/v1/messages`: blocks of content, and the events in which they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from pydantic_core import from_json

from penjing.serve.dialects.writer import Said, Writer
from penjing.serve.front.answers import Ask
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.finite import finite

Event = dict[str, Any]
REASONS = {"stop": "end_turn", "length": "max_tokens"}


class StopText:
    """Finds which of the texts that end an answer has ended it, and cuts it off.

    Args:
        stops: these texts.
        ends: what tokens that end it look like.
    """

    def __init__(self, stops: Sequence[str], ends: Collection[str] = ()) -> None:
        self._stops, self._ends = sorted(stops, key=len, reverse=True), sorted(ends, key=len, reverse=True)
        self.met: str | None = None

    def cut(self, text: str) -> str:
        """The last text of an answer that has met an end, as it is shown."""
        self.met = next((stop for stop in self._stops if text.endswith(stop)), None)
        if self.met is not None:
            return text[: -len(self.met)]
        return next((text[: -len(end)] for end in self._ends if text.endswith(end)), text)


class MessageWriter(Writer):
    """One message. Its events have the order of Anthropic's: a block starts, grows and stops before the next."""

    def __init__(self, ask: Ask, stop: StopText) -> None:
        self._ask, self._stop = ask, stop
        self._content: list[dict[str, Any]] = []
        self._text: list[str] | None = None  # of the block that is open, the last one: what it says or thinks
        self._input: list[str] | None = None  # of the call that is open, the last block
        self._begun = False
        self._ending: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def push(self, said: Said) -> list[Event]:
        """See `Writer`."""
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events.append({"type": "message_start", "message": self.whole()})
        if said.thought:
            events += self._say(said.thought, "thinking")
        if isinstance(said.part, str):
            events += self._say(said.part, "text") if said.part else []
        else:
            if "id" in said.part:
                events += self._close() + self._call(said.part["id"], said.part["function"]["name"])
            events += self._write(said.part["function"]["arguments"])
        if said.reason is not None:
            events += self._close() + self._end(said.reason, said.is_cut)
        return events

    def failed(self, error: ApiError) -> list[Event]:
        """See `Writer`."""
        return [error.for_messages(self._ask.exchange.request_id)]

    def whole(self) -> dict[str, Any]:
        """See `Writer`."""
        return {
            "id": f"msg_{self._ask.exchange.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model.id,
            "content": list(self._content),
            **self._ending,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Tokens that were cached are not among those of the input."""
        usage = self._ask.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": len(self._content), "content_block": block}

    def _grow(self, **delta: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stopped(self) -> Event:
        return {"type": "content_block_stop", "index": len(self._content) - 1}

    def _say(self, text: str, kind: Literal["text", "thinking"]) -> list[Event]:
        events: list[Event] = []
        if self._text is None or self._content[-1]["type"] != kind:
            events += self._close()
            # A signature proves to Anthropic that a thought is its model's own; nobody proves it here.
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events.append(self._start(dict(block)))
            self._content.append(block)
            self._text = []
        self._text.append(text)
        return [*events, self._grow(**{"type": f"{kind}_delta", kind: text})]

    def _close(self) -> list[Event]:
        """End the open block, if there is one."""
        if self._input is not None:
            self._content[-1] |= {"input": _read("".join(self._input))}
            self._input = None
            return [self._stopped()]
        if self._text is None:
            return []
        self._content[-1] |= {self._content[-1]["type"]: "".join(self._text)}
        self._text = None
        return [self._stopped()]

    def _call(self, call_id: str, name: str) -> list[Event]:
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        start = self._start(dict(block))
        self._content.append(block)
        self._input = []
        return [start]

    def _write(self, arguments: str) -> list[Event]:
        """More of the open call's arguments."""
        assert self._input is not None, "the first piece of a call opens it"
        self._input.append(arguments)
        return [self._grow(type="input_json_delta", partial_json=arguments)] if arguments else []

    def _end(self, reason: str, is_cut: bool) -> list[Event]:
        stop_reason = REASONS.get(reason, reason)
        if self._stop.met is not None:
            stop_reason = "stop_sequence"
        elif reason == "stop" and not is_cut and any(block["type"] == "tool_use" for block in self._content):
            stop_reason = "tool_use"
        self._ending = {"stop_reason": stop_reason, "stop_sequence": self._stop.met}
        return [
            {"type": "message_delta", "delta": self._ending, "usage": self._usage()},
            {"type": "message_stop"},
        ]


def _read(arguments: str) -> Any:
    """Arguments of a call, which may be cut off. What is no JSON, or has numbers too long to be read, comes in streams
    alone, whose client reads it by itself."""
    try:
        return finite(from_json(arguments, allow_partial=True))
    except ValueError:
        return {}
