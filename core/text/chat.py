"""Chat templates: a list of messages → the prompt text that the model was trained on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2

from penjing.core.errors import InputError, RequestError
from penjing.core.manifest import read_json_object
from penjing.core.text.chat_sandbox import TemplateRaisedError, TemplateRefusedError, compile_template, render
from penjing.core.text.tool_words import with_calls, with_tools

MAX_TEMPLATE_CHARS = 1_000_000
TEMPLATE_FILE = "chat_template.jinja"
"""Beside the tokenizer."""
_IMAGE = {"type": "image"}
_PROBE = "wherever"  # a word that no template writes by itself
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A compiled chat template; safe to use from several threads.

    Args:
        text: Jinja source.
        source: where it came from, for errors.
        special_tokens: texts that the template may write, such as `bos_token`.

    Attributes: text, special_tokens: as given.

    Raises:
        InputError: it is no Jinja template, or too long.
    """

    def __init__(self, text: str, source: str, special_tokens: dict[str, str] | None = None) -> None:
        if len(text) > MAX_TEMPLATE_CHARS:
            raise InputError(f"{source}: the chat template has {len(text)} characters, at most {MAX_TEMPLATE_CHARS}")
        self.text = text
        self._source = source
        self.special_tokens = special_tokens or {}
        try:
            self._template = compile_template(text)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InputError(
                f"{source}: the chat template is not valid Jinja ({error}); correct or remove it"
            ) from error

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The template in `chat_template.jinja`, else in `chat_template.json`, as processors of images kept it, else in
        `tokenizer_config.json`; None when there is none.

        Raises:
            InputError: a malformed file or template.
        """
        config_path, template_path = folder / "tokenizer_config.json", folder / TEMPLATE_FILE
        config = read_json_object(config_path) if config_path.exists() else {}
        special = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS}
        special = {name: text for name, text in special.items() if text is not None}
        if template_path.exists():
            try:
                return cls(template_path.read_text(encoding="utf-8"), str(template_path), special)
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"cannot read {template_path}: {error}") from error
        processor_path = folder / "chat_template.json"
        processor = read_json_object(processor_path) if processor_path.exists() else {}
        for path, values in ((processor_path, processor), (config_path, config)):
            if (text := _default_template(values.get("chat_template"), path)) is not None:
                return cls(text, str(path), special)
        return None

    @cached_property
    def form(self) -> Literal["text", "parts", "both"]:
        """What it takes a message's `content` for: a text, a list of parts such as `{"type": "text", "text": …}` as
        SmolVLM's does, or either. Found by a trial of both."""

        def takes(content: Any) -> bool:
            found = self._tried([{"role": "user", "content": content}]) or ""
            return _PROBE in found and "'type'" not in found and '"type"' not in found

        if "type" not in self.text or not takes([{"type": "text", "text": _PROBE}]):
            return "text"  # a template that takes parts asks what each of them is
        return "both" if takes(_PROBE) else "parts"

    @cached_property
    def lists_tools(self) -> bool:
        """Whether it writes which tools there are. Found by a trial; one that fails says nothing against it."""
        argument = {"type": "string", "description": _PROBE}
        parameters = {"type": "object", "properties": {_PROBE: argument}, "required": [_PROBE]}
        function = {"name": _PROBE, "description": _PROBE, "parameters": parameters}
        kinds = {"type": "function", "function": function}, function  # OpenAI's, and what some templates take instead
        found = [self._tried([self._message("user", "a")], tools=[tool]) for tool in kinds]
        return any(text is not None and _PROBE in text for text in found) or found[0] is None

    @cached_property
    def writes_calls(self) -> bool:
        """Whether it knows calls of tools, and so their results."""
        return "tool_calls" in self.text

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message. Found by a trial."""
        return _PROBE in (self._tried([self._message("system", _PROBE), self._message("user", "a")]) or "")

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self.form == "parts" else text}

    def _tried(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str | None:
        """What it makes of them; None where it fails, whatever with."""
        values = {"tools": tools, "documents": None, "add_generation_prompt": False, "messages": messages}
        try:
            return render(self._template, self.special_tokens | values)
        except Exception:
            return None

    def render(self, messages: list[dict[str, Any]], /, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt text of a conversation; encode it with `add_special=False`, since it has its begin-of-text.

        Args:
            messages: objects with `role` and `content` (text, or a list of `{"type": "text", "text": …}` parts; with
                `{"type": "image"}` among them where `form` is not "text").
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: further variables of the template, such as `enable_thinking`; a client may name them anything.
                `tools`, and what messages hold of calls, become text of a message where the template knows none.

        Raises:
            RequestError: malformed messages, or a conversation that the template rejects.
            InputError: the template tries what the sandbox refuses.
        """
        values = self.special_tokens | {"tools": None, "documents": None} | variables
        checked = self._in_words(_checked(messages, self.form), values["tools"])
        values |= {"messages": checked, "add_generation_prompt": add_generation_prompt}
        try:
            return render(self._template, values)
        except TemplateRefusedError as error:
            raise InputError(f"{self._source}: the chat template is refused: {error}; correct or remove it") from error
        except TemplateRaisedError as error:
            raise RequestError(f"messages: the chat template rejects them: {error}") from error
        except Exception as error:  # a template is a program of another author: it can fail in any way
            raise RequestError(
                f"messages: the chat template of {self._source} fails on them ({type(error).__name__}: {error})"
            ) from error

    def _in_words(self, messages: list[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
        """`messages` with what the template leaves out of tools and of their calls."""
        parts = self.form == "parts"
        if not self.writes_calls:
            messages = with_calls(messages, parts=parts)
        if tools and isinstance(tools, list) and not self.lists_tools:
            messages = with_tools(messages, tools, parts=parts, system=self.takes_system)
        return messages


def _checked(messages: Any, form: Literal["text", "parts", "both"]) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message with role and content")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{index}] must be an object with role and content (got {message!r:.80})")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(f"messages[{index}].role must be text such as 'user' (got {role!r:.80})")
        if isinstance(content, list) and form != "text" and _IMAGE in content:
            content = [
                part if part == _IMAGE else {"type": "text", "text": _part_text(part, index)} for part in content
            ]
            checked.append({**message, "content": content})
            continue
        if isinstance(content, list):
            content = "".join(_part_text(part, index) for part in content)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{index}].content must be text or a list of text parts (got {content!r:.80})")
        whole = [{"type": "text", "text": content}] if form == "parts" and content is not None else content
        checked.append({**message, "content": whole})
    return checked


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise RequestError(f"messages[{index}].content: only parts of type 'text' are supported (got {part!r:.80})")


def _default_template(value: Any, path: Path) -> str | None:
    """tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise InputError(f"{path}: chat_template must be text or a list with one named 'default'; correct or remove it")
    return value


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
