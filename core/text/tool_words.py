"""Tools in words: what a chat template that knows none of them leaves out, as text of its messages.

Many templates write no tools, and some no calls and no results, so that a model behind one would never see what it may
call. The tags are those of Hermes and Qwen 2.5, which other models have learnt too, and a call is written as the form
`tools` of answers wants it.
"""

from __future__ import annotations

import json
from typing import Any

from penjing.core.errors import RequestError

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_TOLD = """# Tools

These are the functions that you can call, one JSON object a line:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments between <tool_call> and </tool_call>, like this:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>"""

Message = dict[str, Any]


def with_tools(messages: list[Message], tools: list[Any], *, parts: bool, system: bool) -> list[Message]:
    """`messages` that say which tools there are: at the end of the system message, or a new one.

    Args:
        messages: with a text or a list of parts as `content`.
        tools: as OpenAI's interface has them.
        parts: the template takes parts.
        system: the template takes system messages; else the first message begins with the tools.
    """
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0]
    if first["role"] == "system":
        return [{**first, "content": _content(_joined(first["content"], f"\n\n{told}"), parts)}, *messages[1:]]
    if system:
        return [{"role": "system", "content": _content(told, parts)}, *messages]
    return [{**first, "content": _content(_joined(f"{told}\n\n", first["content"]), parts)}, *messages[1:]]


def with_calls(messages: list[Message], *, parts: bool) -> list[Message]:
    """`messages` whose calls stand in the assistant's text, and results in a message of the user.

    Raises:
        RequestError: calls that are none.
    """
    found = list[Message]()
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            result = _joined(_joined("<tool_response>\n", message["content"]), "\n</tool_response>")
            if place and messages[place - 1]["role"] == "tool":
                result = _joined(_joined(found.pop()["content"], "\n"), result)
            found.append({"role": "user", "content": _content(result, parts)})
        elif message["role"] == "assistant" and message.get("tool_calls"):
            calls, said = _written(message["tool_calls"], place), message["content"]
            content = _joined(_joined(said, "\n"), calls) if said else calls
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append({**kept, "content": _content(content, parts)})
        else:
            found.append(message)
    return found


def _written(calls: Any, place: int) -> str:
    texts = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        given = function if isinstance(function, dict) else {}
        name, arguments = given.get("name"), given.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, str | dict | None):
            raise RequestError(
                f"messages[{place}].tool_calls must be a list of calls, each with a function's name and an object of "
                f"arguments (got {calls!r:.80})"
            )
        written = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        texts.append(f"{CALL_BEGIN}\n{head}{written or '{}'}}}\n{CALL_END}")
    return "\n".join(texts)


def _content(content: Any, parts: bool) -> Any:
    return [{"type": "text", "text": content}] if parts and isinstance(content, str) else content


def _joined(first: Any, second: Any) -> Any:
    """Two contents behind each other, each a text, a list of parts or none."""
    first, second = first or "", second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*_content(first, True), *_content(second, True)]
