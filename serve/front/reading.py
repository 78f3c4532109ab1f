"""An answer's text as it comes apart: what is thought, what is said, and which tools are called."""

from __future__ import annotations

import asyncio
from typing import Any

from penjing.serve.front.answers import Ask
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import ChatBody
from penjing.serve.front.thoughts import ThoughtReader
from penjing.serve.front.tools import CallReader, Part
from penjing.serve.front.upstream import Upstream
from penjing.serve.gate.errors import ApiError


class AnswerReader:
    """Takes the text of one answer.

    Args:
        thoughts: of a model that thinks.
        tools: whether it may call some.
        partial: see `CallReader`.
    """

    def __init__(self, thoughts: ThoughtReader | None, *, tools: bool, partial: bool) -> None:
        self._thoughts = thoughts
        self._calls = CallReader(partial=partial) if tools else None
        self.thought: list[str] = []
        """All that has been thought."""

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[Part]]:
        """New text; what is new of the thought, and behind it what is said and called. `last`: none comes after it."""
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.push(text, last=last)
        if thought:
            self.thought.append(thought)
        if self._calls is not None:
            return thought, self._calls.push(text, last=last)
        return thought, [text] if text else []

    @property
    def thinks(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._thoughts is not None and self._thoughts.inside

    @property
    def is_cut(self) -> bool:
        """See `CallReader`."""
        return self._calls is not None and self._calls.is_cut

    @property
    def calls(self) -> bool:
        """Whether the answer ends with calls that are complete."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_cut


def _behind_thought(guided: dict[str, Any], begun: bool) -> dict[str, Any]:
    """A form that begins where a thought ends. Any text may stand before a call that is not required."""
    free = guided["kind"] == "tools" and guided["value"].get("choice", "auto") == "auto"
    return guided if free else guided | {"thought": "begun" if begun else "open"}


class Reading:
    """How the answers to one request are read; see `of`.

    Args:
        begun: whether they begin inside of a thought; None of a model without thoughts.
    """

    def __init__(self, upstream: Upstream, ask: Ask, begun: bool | None, *, tools: bool) -> None:
        self._upstream, self._ask, self._begun, self._tools = upstream, ask, begun, tools

    @classmethod
    async def of(cls, backend: Backend, ask: Ask, body: ChatBody, setting: str = "reasoning_effort") -> Reading:
        """Of what a chat is asked for. Where the marks of a thought are control tokens, the engine shows them.

        Args:
            setting: what the client calls `reasoning_effort`.

        Raises:
            ApiError: the model is to think and cannot.
        """
        upstream, sampling = backend.upstream(ask.model), ask.sampling
        thinking = await upstream.thinking()
        if body.reasoning_effort not in (None, "none") and not thinking.thinks:
            text = f"{ask.model.id} does not think before it answers; leave {setting} out."
            raise ApiError(400, text, code="unsupported", param=setting)
        if thinking.thinks:
            ask.thought_tokens = 0
        split = thinking.thinks
        if split and thinking.special:
            split = not sampling.setdefault("skip_special_tokens", False)
        variables = sampling.get("chat_template_kwargs", {})
        begun = await thinking.begun(variables) if split else None
        told_not_to = not begun and variables.get("enable_thinking") is False
        if begun is not None and not told_not_to and "guided" in sampling:
            sampling["guided"] = _behind_thought(sampling["guided"], begun)
        return cls(upstream, ask, begun, tools=bool(body.offered))

    def reader(self, *, partial: bool) -> AnswerReader:
        """Of one more answer."""
        thoughts = None if self._begun is None else ThoughtReader(begun=self._begun)
        return AnswerReader(thoughts, tools=self._tools, partial=partial)

    async def count(self, reader: AnswerReader) -> None:
        """Add the tokens of what was thought to those of the request, for its usage."""
        if reader.thought:
            tokenizer = await self._upstream.tokenizer()
            tokens = await asyncio.to_thread(tokenizer.encode_beside, "".join(reader.thought), False)
            self._ask.thought_tokens = (self._ask.thought_tokens or 0) + len(tokens)
