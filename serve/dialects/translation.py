"""What the bodies of other interfaces have in common: they become the body of a chat, which is then asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Discriminator, Tag

from penjing.serve.front.bodies import (
    MAX_MESSAGES,
    ChatBody,
    ChatMessage,
    ImagePart,
    ImageUrl,
    Sampling,
    TextPart,
    ToolCall,
)
from penjing.serve.gate.errors import ApiError


def kinds(*names: str, default: str | None = None, alike: Mapping[str, str] | None = None) -> Discriminator:
    """Tells objects of a list apart by their `type`; one without has the type `default`. `alike`: types with the tag of
    another."""
    same = alike or {}

    def kind(value: Any) -> str | None:
        found = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return marked(same.get(found, found)) if found in names else None

    text = f"an object of the type {' or '.join(names)} is meant"
    return Discriminator(kind, custom_error_type="unknown_type", custom_error_message=text)


def tag(name: str) -> Tag:
    """Of the type `name` among `kinds`."""
    return Tag(marked(name))


def marked(name: str) -> str:
    """A type's name as errors know it: in brackets, since it is no part of the field's name."""
    return f"[{name}]"


class Chat:
    """Messages of a chat as they are gathered from other objects."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._thought = ""

    def say(self, role: str, content: str | Sequence[TextPart | ImagePart]) -> None:
        """Add a message; parts without an image are one text."""
        if not isinstance(content, str) and not any(isinstance(part, ImagePart) for part in content):
            content = joined(content)
        self._add(role=role, content=content)

    def call(self, call: ToolCall) -> None:
        """Add a call to the assistant's message that it belongs to."""
        last = self._assistant()
        last.tool_calls = [*(last.tool_calls or []), call]

    def think(self, text: str) -> None:
        """What the assistant thought before its next message, or before its calls."""
        self._thought += text

    def _assistant(self) -> ChatMessage:
        """The assistant's last message; a new one where another spoke since, or where it has thought."""
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or self._thought:
            last = self._add(role="assistant", content=None)
        return last

    def _add(self, **values: Any) -> ChatMessage:
        thought, self._thought = self._thought, ""  # of whom nobody spoke next it is nobody's
        if values["role"] == "assistant" and thought:
            values["reasoning_content"] = thought
        self.messages.append(ChatMessage.model_construct(**values))
        return self.messages[-1]

    def result(self, call_id: str, text: str) -> None:
        """Add what a tool answered."""
        self._add(role="tool", content=text, tool_call_id=call_id)

    def body(self, body: Sampling, **values: Any) -> ChatBody:
        """The body of a chat with these messages, the sampling of `body`, and further `values`, which are valid.

        Raises:
            ApiError: there are more messages than a chat may have.
        """
        if len(self.messages) > MAX_MESSAGES:
            text = f"These are {len(self.messages)} messages, at most {MAX_MESSAGES} are read."
            raise ApiError(400, text, code="invalid_value", param="messages")
        same = {name: getattr(body, name) for name in Sampling.model_fields}
        return ChatBody.model_construct(messages=self.messages, **same | values)


def text_part(text: str) -> TextPart:
    """As a chat has it."""
    return TextPart.model_construct(type="text", text=text)


def image_part(url: str) -> ImagePart:
    """An image in a `data:` URL, as a chat has it."""
    return ImagePart.model_construct(type="image_url", image_url=ImageUrl.model_construct(url=url))


def joined(content: str | Sequence[Any]) -> str:
    """The text of content that is text or parts with a `text`."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
