"""The answer of `/v1/responses`: items of output, and the events in which they come."""

from __future__ import annotations

import time
from typing import Any

from pydantic_core import from_json

from penjing.serve.dialects.response_body import ResponseBody
from penjing.serve.dialects.writer import Said, Writer
from penjing.serve.front.answers import Ask
from penjing.serve.front.logprobs import of_chat
from penjing.serve.gate.errors import ApiError

Event = dict[str, Any]


class ResponseWriter(Writer):
    """One response. Its events have the order of OpenAI's: an item is added, grows and is done before the next."""

    def __init__(self, ask: Ask, body: ResponseBody) -> None:
        self._ask, self._body = ask, body
        self._head = _head(ask, body)
        self._output: list[dict[str, Any]] = []
        self._thought: list[str] | None = None  # of the reasoning that is open, the last item
        self._text: list[str] | None = None  # of the message that is open, the last item
        self._arguments: list[str] | None = None  # of the call that is open, the last item
        self._logprobs: list[dict[str, Any]] = []  # of that message
        self._unsaid: list[dict[str, Any]] = []  # of text that is held back
        self._num_events = 0
        self._state: dict[str, Any] = {"status": "in_progress"}

    def push(self, said: Said) -> list[Event]:
        """See `Writer`."""
        events = [] if self._num_events else [self._event("created", response=self.whole())]
        if events:
            events.append(self._event("in_progress", response=self.whole()))
        if said.thought:
            self._unsaid = []  # the beginning of a mark, which was held back
            return events + self._think(said.thought)
        if self._body.wants_logprobs:
            self._unsaid += _tokens(of_chat(said.logprobs, self._body.top_logprobs or 0))
        if isinstance(said.part, str):
            events += self._say(said.part) if said.part else []
        else:
            if "id" in said.part:
                events += self._close("completed") + self._call(said.part["id"], said.part["function"]["name"])
            events += self._write(said.part["function"]["arguments"])
        if said.reason is not None:
            events += self._end(said.reason, said.is_cut)
        return events

    def failed(self, error: ApiError) -> list[Event]:
        """See `Writer`."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._state = {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*self._close("incomplete"), self._event("failed", response=self.whole())]

    def whole(self) -> dict[str, Any]:
        """See `Writer`."""
        return self._head | {"model": self._ask.model.id, "output": list(self._output)} | self._state

    def _event(self, kind: str, **values: Any) -> Event:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **values}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._ask.exchange.request_id}_{len(self._output)}"

    def _say(self, text: str) -> list[Event]:
        events = [] if self._text is not None else [*self._close("completed"), *self._open()]
        assert self._text is not None, "just opened"
        self._text.append(text)
        new, self._unsaid = self._unsaid, []
        self._logprobs += new
        return [*events, self._event("output_text.delta", **self._place(), delta=text, logprobs=new)]

    def _think(self, text: str) -> list[Event]:
        events = [] if self._thought is not None else [*self._close("completed"), *self._open_thought()]
        assert self._thought is not None, "just opened"
        self._thought.append(text)
        return [*events, self._event("reasoning_text.delta", **self._place(), delta=text)]

    def _open_thought(self) -> list[Event]:
        item = {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        added = self._event("output_item.added", output_index=len(self._output), item=item)
        self._output.append(item)
        self._thought = []
        part = {"type": "reasoning_text", "text": ""}
        return [added, self._event("content_part.added", **self._place(), part=part)]

    def _close_thought(self, status: str) -> list[Event]:
        text, place, self._thought = "".join(self._thought or ()), self._place(), None
        part = {"type": "reasoning_text", "text": text}
        self._output[-1] = self._output[-1] | {"status": status, "content": [part]}
        return [
            self._event("reasoning_text.done", **place, text=text),
            self._event("content_part.done", **place, part=part),
            self._event("output_item.done", output_index=place["output_index"], item=self._output[-1]),
        ]

    def _place(self) -> dict[str, Any]:
        """Where the text of the open message or thought stands."""
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1, "content_index": 0}

    def _open(self) -> list[Event]:
        item = {"id": self._id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        added = self._event("output_item.added", output_index=len(self._output), item=item)
        self._output.append(item)
        self._text, self._logprobs = [], []
        return [added, self._event("content_part.added", **self._place(), part=_part("", []))]

    def _close(self, status: str) -> list[Event]:
        """End what is open, if something is."""
        if self._thought is not None:
            return self._close_thought(status)
        if self._arguments is not None:
            return self._close_call(status)
        if self._text is None:
            return []
        text, place = "".join(self._text), self._place()
        part = _part(text, self._logprobs)
        self._output[-1] = self._output[-1] | {"status": status, "content": [part]}
        self._text = None
        return [
            self._event("output_text.done", **place, text=text, logprobs=self._logprobs),
            self._event("content_part.done", **place, part=part),
            self._event("output_item.done", output_index=place["output_index"], item=self._output[-1]),
        ]

    def _call(self, call_id: str, name: str) -> list[Event]:
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call_id, "name": name}
        item |= {"arguments": "", "status": "in_progress"}
        added = self._event("output_item.added", output_index=len(self._output), item=item)
        self._output.append(item)
        self._arguments = []
        return [added]

    def _write(self, arguments: str) -> list[Event]:
        """More of the open call's arguments."""
        assert self._arguments is not None, "the first piece of a call opens it"
        if not arguments:
            return []
        self._arguments.append(arguments)
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return [self._event("function_call_arguments.delta", **place, delta=arguments)]

    def _close_call(self, status: str) -> list[Event]:
        item = self._output[-1]
        arguments, self._arguments = "".join(self._arguments or ()), None
        if _is_whole(arguments):  # whatever cut the answer off came behind it
            status = "completed"
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        done = {"name": item["name"], "arguments": arguments}
        self._output[-1] = item | {"arguments": arguments, "status": status}
        return [
            self._event("function_call_arguments.done", **place, **done),
            self._event("output_item.done", output_index=place["output_index"], item=self._output[-1]),
        ]

    def _end(self, reason: str, is_cut: bool) -> list[Event]:
        events = [] if self._output else self._open()  # an answer of no text is a message without any
        cut = reason == "length"
        events += self._close("incomplete" if cut or is_cut else "completed")
        self._state = {"status": "incomplete" if cut else "completed", "usage": _usage(self._ask.usage)}
        if cut:
            self._state["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._state["completed_at"] = int(time.time())
        return [*events, self._event("incomplete" if cut else "completed", response=self.whole())]


def _is_whole(arguments: str) -> bool:
    try:
        from_json(arguments)
    except ValueError:
        return False
    return True


def _head(ask: Ask, body: ResponseBody) -> dict[str, Any]:
    """What is known of a response before it has begun."""
    given = body.model_dump(include={"tools", "tool_choice", "text"}, exclude_none=True, by_alias=True)
    return {
        "id": f"resp_{ask.exchange.request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": ask.model.id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}} | given.get("text", {}),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _tokens(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Of tokens that are half a character the bytes are not known: none are named."""
    return [
        {
            **token,
            "bytes": token["bytes"] or [],
            "top_logprobs": [likely | {"bytes": likely["bytes"] or []} for likely in token["top_logprobs"]],
        }
        for token in logprobs["content"]
    ]


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": usage["total_tokens"],
    }
