"""Tools, calls and results of a chat reach a model whose template knows none of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penjing.core.errors import RequestError
from penjing.core.text.chat import ChatTemplate

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OF_PARTS = PLAIN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text if p['type'] == 'text' }}{% endfor %}")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
LISTS_TOOLS = "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}" + PLAIN
KNOWS_ALL = LISTS_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
LOOK = {"type": "function", "function": {"name": "look", "description": "Wörter", "parameters": {"type": "object"}}}
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "ü"}}},
    {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"at": 1e2}'}},
]
ASKED = [{"role": "user", "content": "What is there?"}]
ANSWERED = [
    *ASKED,
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "1", "content": "a tree"},
    {"role": "tool", "tool_call_id": "2", "content": "a pot"},
]
WRITTEN = (
    '[assistant]I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "ü"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": 1e2}}\n</tool_call>'
    "[user]<tool_response>\na tree\n</tool_response>\n<tool_response>\na pot\n</tool_response>"
)


def render(template: str, messages: Any, **variables: Any) -> str:
    return ChatTemplate(template, "test").render(messages, **variables)


@pytest.mark.parametrize("template", [PLAIN, OF_PARTS])
def test_a_template_without_tools_has_them_in_its_system_message(template: str) -> None:
    found = render(template, ASKED, tools=[LOOK])
    system, user = found.split("[user]")
    assert system.startswith("[system]")
    assert user == "What is there?"
    assert f"<tools>\n{json.dumps(LOOK, ensure_ascii=False)}\n</tools>" in system
    assert '<tool_call>\n{"name": ' in system  # and how one is called

    kept = render(template, [{"role": "system", "content": "Be brief."}, *ASKED], tools=[LOOK])
    assert kept == found.replace("[system]", "[system]Be brief.\n\n")


def test_a_template_without_system_messages_has_them_before_the_question() -> None:
    found = render(NO_SYSTEM, ASKED, tools=[LOOK])
    assert found.startswith("[user]# Tools")
    assert found.endswith("</tool_call>\n\nWhat is there?")


@pytest.mark.parametrize("template", [PLAIN, OF_PARTS])
def test_calls_and_results_are_written_where_the_template_knows_none(template: str) -> None:
    assert render(template, ANSWERED) == "[user]What is there?" + WRITTEN
    assert (
        render(template, [ASKED[0], {**ANSWERED[1], "content": None}])
        == "[user]What is there?" + WRITTEN.replace("I look.\n", "").partition("[user]")[0]
    )


def test_what_a_template_knows_is_left_to_it() -> None:
    assert render(LISTS_TOOLS, ASKED, tools=[LOOK]) == "(look)[user]What is there?"
    assert render(LISTS_TOOLS, ANSWERED, tools=[LOOK]) == "(look)[user]What is there?" + WRITTEN
    found = render(KNOWS_ALL, ANSWERED, tools=[LOOK])
    assert found.startswith("(look)")
    assert "[tool]a tree" in found
    assert "<tool_call>" not in found


def test_a_conversation_without_tools_stays_as_it_is() -> None:
    for tools in (None, [], "none"):
        assert render(PLAIN, ASKED, tools=tools) == "[user]What is there?"


@pytest.mark.parametrize(("role", "template"), [("assistant", NO_SYSTEM), ("system", PLAIN), ("system", OF_PARTS)])
def test_tools_stand_before_a_first_message_that_says_nothing(role: str, template: str) -> None:
    calls = [{"function": {"name": "look", "arguments": {}}}]
    first = {"role": role, "content": None, "tool_calls": calls}
    found = render("{% if tool_calls %}{% endif %}" + template, [first, *ASKED], tools=[LOOK])
    assert json.dumps(LOOK, ensure_ascii=False) in found.split("[user]")[0]


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_a_call_may_be_without_arguments(arguments: Any) -> None:
    calls = [{"function": {"name": "look", "arguments": arguments}}]
    found = render(PLAIN, [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}])
    assert found.endswith('[assistant]<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_without_content_and_calls_is_refused(calls: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.content must be text"):
        render(PLAIN, [*ASKED, {"role": "assistant", "content": None, "tool_calls": calls}])


@pytest.mark.parametrize(
    "calls", ["look", [{"function": {"arguments": {}}}], [3], [{"function": {"name": "a", "arguments": [1]}}]]
)
def test_calls_that_are_none_are_refused(calls: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls must be a list of calls"):
        render(PLAIN, [{"role": "assistant", "content": "", "tool_calls": calls}])
