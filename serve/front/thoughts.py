"""What a model thinks before it answers: the text between two marks, which comes apart from what it says.

Qwen3, SmolLM3, DeepSeek's R1 and those that learnt from them write it between `<think>` and `</think>`. Some templates
write the first mark at the end of the prompt, so that an answer begins with a thought.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

from penjing.core.errors import PenjingError
from penjing.core.text.chat import ChatTemplate
from penjing.serve.front.logprobs import Entry
from penjing.serve.sampling.guided import THOUGHT_BEGIN as BEGIN
from penjing.serve.sampling.guided import THOUGHT_END as END


class ThoughtReader:
    """Takes one answer's text as it comes apart into what is thought and what is said.

    Text that could still become a mark is held back, and so are blanks around a thought, which are nobody's words.

    Args:
        begun: the prompt ends behind `BEGIN`.
    """

    def __init__(self, *, begun: bool) -> None:
        self._place: Literal["before", "inside", "behind"] = "inside" if begun else "before"
        self._text = ""
        self._fresh = True  # nothing of this place has been shown

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """New text; what is new of the thought, and of what is said. `last`: none comes after it."""
        self._text += text
        if self._place == "before" and not self._begins(last):
            return "", ""
        thought = self._thought(last) if self._place == "inside" else ""
        return thought, self._said() if self._place == "behind" else ""

    @property
    def inside(self) -> bool:
        """Whether a thought has begun and not ended."""
        return self._place == "inside"

    def _begins(self, last: bool) -> bool:
        """Whether it is known where the answer begins."""
        text = self._text.lstrip()
        if text.startswith(BEGIN):
            self._place = "inside"
        elif last or not BEGIN.startswith(text):
            self._place, self._fresh = "behind", False
        return self._place != "before"

    def _thought(self, last: bool) -> str:
        if self._fresh:
            self._text = self._text.lstrip()
            if self._text.startswith(BEGIN):  # some write the mark that the prompt has
                self._text = self._text[len(BEGIN) :].lstrip()
            elif BEGIN.startswith(self._text) and not last:
                return ""
        thought, mark, rest = self._text.partition(END)
        if mark:
            self._place, self._fresh, self._text = "behind", True, rest
            return thought.rstrip()
        thought = self._text[: len(self._text) - (0 if last else _held_back(self._text))].rstrip()
        self._text = self._text[len(thought) :]
        self._fresh = self._fresh and not thought
        return thought

    def _said(self) -> str:
        text, self._text = self._text, ""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


def behind_thought(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The tokens of the answer among those that a thought ends with; none where it does not end."""
    text = ""
    for count, entry in enumerate(entries, 1):
        text += next(iter(entry.values()))["decoded_token"]
        if END in text:
            return entries[count:]
    return []


def begins_inside(template: ChatTemplate, variables: dict[str, Any]) -> bool:
    """Whether the prompt of a conversation ends behind `BEGIN`, as far as the `variables` of its template say."""
    try:
        return template.render([{"role": "user", "content": "a"}], **variables).rstrip().endswith(BEGIN)
    except PenjingError:  # the engine says so of the conversation itself
        return False


class Thinker:
    """How the answers of one model begin.

    Args:
        template: of the model's conversations.

    Attributes:
        special: the marks are control tokens, which are not shown unless the engine is told to.
    """

    def __init__(self, template: ChatTemplate | None) -> None:
        self._template = template if template is not None and END in template.text else None
        self._begun: dict[str, bool] = {}
        self.special = False

    @property
    def thinks(self) -> bool:
        """Whether the template knows thoughts."""
        return self._template is not None

    async def begun(self, variables: dict[str, Any]) -> bool:
        """Whether answers to conversations that are written with these `variables` begin inside of a thought.

        The template is tried once for each, beside the loop: a client may give it much to write.
        """
        assert self._template is not None, "it thinks"
        plain = {name: value for name, value in variables.items() if name != "tools"}
        key = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
        if (found := self._begun.get(key)) is None:
            found = await asyncio.to_thread(begins_inside, self._template, plain)
            if len(self._begun) >= 64:  # a client may name its variables anything
                self._begun.clear()
            self._begun[key] = found
        return found


def _held_back(text: str) -> int:
    """Characters at the end of `text` that `END` may begin with."""
    return next((size for size in range(min(len(text), len(END) - 1), 0, -1) if END.startswith(text[-size:])), 0)
