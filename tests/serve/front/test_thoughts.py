"""Answers of models that think first, in each interface's words: the thought comes apart from what is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.client.wire_text import Chunk
from penjing.serve.front.thoughts import ThoughtReader
from tests.serve.front.scripted import ScriptedFront

USER = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    MESSAGES: {"messages": USER, "max_tokens": 9},
    RESPONSES: {"input": "hi"},
}
QWEN = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}"""
R1 = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, template in (("qwen", QWEN), ("r1", R1)):
        found[name] = Path(shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("thinking") / name))
        (found[name] / "chat_template.jinja").write_text(template)
    return found


@pytest.fixture(scope="module")
def qwen(folders: dict[str, Path]) -> Iterator[ScriptedFront]:
    with ScriptedFront(folders["qwen"]) as front:
        yield front


@pytest.fixture(scope="module")
def r1(folders: dict[str, Path]) -> Iterator[ScriptedFront]:
    with ScriptedFront(folders["r1"]) as front:
        yield front


def read(pieces: list[str], begun: bool) -> tuple[str, str]:
    reader = ThoughtReader(begun=begun)
    found = [reader.push(piece) for piece in pieces] + [reader.push("", last=True)]
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


@pytest.mark.parametrize(
    ("text", "begun", "thought", "said"),
    [
        ("", False, "", ""),
        ("Hi. ", False, "", "Hi. "),
        (" \nHi", False, "", " \nHi"),
        ("<think>\nI see.\n\nSo.\n</think>\n\nHi.\n", False, "I see.\n\nSo.", "Hi.\n"),
        ("\n<think></think>Hi", False, "", "Hi"),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("<thin", False, "", "<thin"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>a <b> </thin> c", False, "a <b> </thin> c", ""),
        ("<think>a</th", False, "a</th", ""),
        ("I see.\n</think>\nHi", True, "I see.", "Hi"),
        ("<think>\nI see.</think>Hi", True, "I see.", "Hi"),
        ("I see", True, "I see", ""),
        ("<thin", True, "<thin", ""),
        ("", True, "", ""),
        ("a</think>b</think>c", True, "a", "b</think>c"),
    ],
)
def test_a_thought_ends_at_its_mark_in_whatever_pieces_it_comes(
    text: str, begun: bool, thought: str, said: str
) -> None:
    assert read([text], begun) == read(list(text), begun) == (thought, said)


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "a", "bc", "<", "</thi"]), max_size=12)


@given(PARTS, st.lists(st.integers(0, 60), max_size=10), st.booleans())
def test_pieces_are_what_the_whole_is(parts: list[str], cuts: list[int], begun: bool) -> None:
    text = "".join(parts)
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    reader = ThoughtReader(begun=begun)
    assert read(pieces, begun) == read([text], begun) == reader.push(text, last=True)


def whole(front: ScriptedFront, path: str, **more: Any) -> tuple[str, str]:
    """What an answer has thought and said."""
    answer = front.ask(path, BODIES[path] | {"model": "m"} | more)
    assert answer.status == 200, answer.body
    if path == CHAT:
        message = answer.json["choices"][0]["message"]
        return message.get("reasoning_content", ""), message["content"] or ""
    parts = answer.json["content"] if path == MESSAGES else answer.json["output"]
    thoughts = [part for part in parts if part["type"] in ("thinking", "reasoning")]
    said = [part for part in parts if part["type"] in ("text", "message")]
    assert parts[: len(thoughts)] == thoughts
    if path == MESSAGES:
        return "".join(part["thinking"] for part in thoughts), "".join(part["text"] for part in said)
    return tuple("".join(part["content"][0]["text"] for part in some) for some in (thoughts, said))  # type: ignore[return-value]


def streamed(front: ScriptedFront, path: str, **more: Any) -> tuple[str, str]:
    thought = said = ""
    for event in front.events(path, BODIES[path] | {"model": "m"} | more):
        if path == CHAT:
            delta = event["choices"][0]["delta"]
            assert not ("reasoning_content" in delta and said)
            thought, said = thought + delta.get("reasoning_content", ""), said + delta.get("content", "")
        elif event["type"] == "content_block_delta":
            thought += event["delta"].get("thinking", "")
            said += event["delta"].get("text", "")
        else:
            thought += event["delta"] if event["type"] == "response.reasoning_text.delta" else ""
            said += event["delta"] if event["type"] == "response.output_text.delta" else ""
    return thought, said


@pytest.mark.parametrize("path", BODIES)
def test_a_thought_stands_apart_in_each_interface(path: str, qwen: ScriptedFront, r1: ScriptedFront) -> None:
    thinks = ["<thi", "nk>\nI ", "see.\n", "</think>", "\n\nHi", " you."]
    for front, pieces in ((qwen, thinks), (r1, ["I ", "see.\n</thi", "nk>", "\nHi you."])):
        front.script.pieces = pieces
        assert streamed(front, path) == whole(front, path) == ("I see.", "Hi you.")
        front.script.pieces = ["Hi", "."]
        assert streamed(front, path) == whole(front, path) == (("Hi.", "") if front is r1 else ("", "Hi."))


def test_a_model_without_thoughts_says_what_it_writes() -> None:
    with ScriptedFront() as front:
        front.script.pieces = ["<think>a</think>", "b"]
        for path in BODIES:
            assert streamed(front, path) == whole(front, path) == ("", "<think>a</think>b")
        for path, more, param in (
            (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
            (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
            (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning"),
        ):
            answer = front.ask(path, BODIES[path] | {"model": "m"} | more)
            assert answer.status == 400
            assert answer.json["error"]["param"] == param
            assert f"m does not think before it answers; leave {param} out" in answer.json["error"]["message"]
        assert whole(front, CHAT, reasoning_effort="none") == ("", "<think>a</think>b")
        assert whole(front, MESSAGES, thinking={"type": "disabled"}) == ("", "<think>a</think>b")


def test_how_much_is_thought_is_the_templates_matter(qwen: ScriptedFront) -> None:
    qwen.script.pieces = ["Hi"]
    for path, more, thinks in (
        (CHAT, {"reasoning_effort": "none"}, False),
        (CHAT, {"reasoning_effort": "high"}, True),
        (MESSAGES, {"thinking": {"type": "disabled"}}, False),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        (RESPONSES, {"reasoning": {"effort": "minimal"}}, False),
    ):
        assert whole(qwen, path, **more) == ("", "Hi")
        assert qwen.script.asked["chat_template_kwargs"]["enable_thinking"] is thinks
    own = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert whole(qwen, CHAT, **own) == ("", "Hi")
    assert qwen.script.asked["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "none"}
    assert whole(qwen, RESPONSES) == ("", "Hi")
    assert "chat_template_kwargs" not in qwen.script.asked


def test_a_template_may_begin_a_thought_for_some_variables_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["r1"], tmp_path / "both"))
    (folder / "chat_template.jinja").write_text(R1.replace("<think>", "{% if thinking %}<think>{% endif %}"))
    with ScriptedFront(folder) as front:
        front.script.pieces = ["a", "</think>b"]
        assert streamed(front, CHAT, chat_template_kwargs={"thinking": True}) == ("a", "b")
        assert streamed(front, CHAT) == ("", "a</think>b")
        for number in range(70):  # what a client names is not kept for ever
            assert whole(front, CHAT, chat_template_kwargs={"thinking": True, "x": number}) == ("a", "b")


def test_a_form_holds_behind_a_thought(qwen: ScriptedFront, r1: ScriptedFront) -> None:
    more = {"response_format": {"type": "json_object"}}
    for front, begin, thought in ((r1, "", "begun"), (qwen, "<think>", "open")):
        front.script.pieces = [f"{begin}I {{see}}.", '</think>\n\n{"a"', ": 1}"]
        assert streamed(front, CHAT, **more) == whole(front, CHAT, **more) == ("I {see}.", '{"a": 1}')
        assert front.script.asked["guided"] == {"kind": "json_object", "thought": thought}
    qwen.script.pieces = ['{"a": 1}']
    off: tuple[dict[str, Any], ...] = (
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    )
    for told in off:
        assert whole(qwen, CHAT, **told, **more) == ("", '{"a": 1}')
        assert qwen.script.asked["guided"] == {"kind": "json_object"}, told
    assert whole(qwen, CHAT, **more) == ("", '{"a": 1}')


def test_a_call_that_is_required_stands_behind_a_thought(r1: ScriptedFront) -> None:
    """It was taken for the end of the thought, which nothing but the call could follow."""
    r1.script.pieces = [f"I will.</think>\n{CALL}"]
    for choice, thought in (("required", "begun"), ("auto", None)):
        body = BODIES[CHAT] | {"model": "m", "tools": [TOOL], "tool_choice": choice}
        message = r1.ask(CHAT, body).json["choices"][0]["message"]
        assert (message["reasoning_content"], len(message["tool_calls"])) == ("I will.", 1)
        assert r1.script.asked["guided"].get("thought") == thought


def test_calls_stand_behind_a_thought_which_may_speak_of_them(qwen: ScriptedFront) -> None:
    qwen.script.pieces = [f"<think>I could {CALL}, or not.", f"</think>\n{CALL}"]
    body = BODIES[CHAT] | {"model": "m", "tools": [TOOL]}
    message = qwen.ask(CHAT, body).json["choices"][0]
    assert message["message"]["reasoning_content"] == f"I could {CALL}, or not."
    assert message["message"]["content"] is None
    assert [call["function"]["name"] for call in message["message"]["tool_calls"]] == ["f"]
    assert message["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0] for event in qwen.events(CHAT, body)]
    assert sum("id" in call for each in deltas for call in each["delta"].get("tool_calls", ())) == 1
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_thoughts_are_counted(qwen: ScriptedFront, folders: dict[str, Path]) -> None:
    qwen.script.pieces = ["<think>I see what you mean.", "</think>Hi"]
    count = len(Tokenizer.from_folder(folders["qwen"]).encode("I see what you mean.", add_special=False))
    found = qwen.ask(CHAT, BODIES[CHAT] | {"model": "m"}).json["usage"]
    assert found["completion_tokens_details"] == {"reasoning_tokens": count}
    last = qwen.events(CHAT, BODIES[CHAT] | {"model": "m", "stream_options": {"include_usage": True}})[-1]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    usage = qwen.ask(RESPONSES, BODIES[RESPONSES] | {"model": "m"}).json["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": count}


def test_what_was_thought_before_reaches_the_template(qwen: ScriptedFront) -> None:
    qwen.script.pieces = ["Hi"]
    before = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    blocks = [{"type": "thinking", "thinking": "a", "signature": ""}, {"type": "text", "text": "b"}]
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}], "id": "rs_1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "y"},
    ]
    turns = [{"role": "user", "content": "x"}, None, {"role": "user", "content": "y"}]
    for path, more in (
        (CHAT, {"messages": [turns[0], before, turns[2]]}),
        (MESSAGES, {"messages": [turns[0], {"role": "assistant", "content": blocks}, turns[2]]}),
        (RESPONSES, {"input": items}),
    ):
        assert whole(qwen, path, **more) == ("", "Hi")
        assert qwen.script.asked["messages"] == [turns[0], before, turns[2]]
    lost = [items[1], items[3], items[2], items[0]]  # no answer stands behind the thought
    assert whole(qwen, RESPONSES, input=lost) == ("", "Hi")
    assert all("reasoning_content" not in message for message in qwen.script.asked["messages"])
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "z"}
    assert whole(qwen, RESPONSES, input=[items[0], items[1], call, result]) == ("", "Hi")
    (_, called, _) = qwen.script.asked["messages"]
    assert (called["reasoning_content"], called["tool_calls"][0]["function"]["name"]) == ("a", "f")


def test_marks_that_are_control_tokens_are_asked_for(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen"], tmp_path / "special"))
    values = json.loads((folder / "tokenizer.json").read_text())
    number = max([*values["model"]["vocab"].values(), *(token["id"] for token in values["added_tokens"])]) + 1
    values["added_tokens"] += [values["added_tokens"][0] | {"id": number, "content": "</think>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with ScriptedFront(folder) as front:
        front.script.pieces = ["<think>a</think>b"]
        assert whole(front, CHAT) == ("a", "b")
        assert front.script.asked["skip_special_tokens"] is False
        assert whole(front, CHAT, skip_special_tokens=True) == ("", "<think>a</think>b")  # as it was asked for


def test_a_damaged_template_costs_no_answer(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["qwen"], tmp_path / "damaged"))
    (folder / "chat_template.jinja").write_text("{% if </think>")
    with ScriptedFront(folder) as front:
        front.script.pieces = ["Hi"]
        assert whole(front, CHAT) == ("", "Hi")


def test_log_probabilities_of_a_response_are_those_of_what_is_said(
    qwen: ScriptedFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["<think>", "a", "</think>", "b", "c"]

    async def stream(*_: Any, whole: bool, **__: Any) -> Any:
        entries = [{str(n): {"logprob": -1.0, "rank": 1, "decoded_token": word}} for n, word in enumerate(words)]
        if whole:
            yield Chunk("".join(words), "stop", num_tokens=5, num_input_tokens=5, logprobs=entries)
            return
        for number, (word, entry) in enumerate(zip(words, entries, strict=True), 1):
            yield Chunk(word, "stop" if number == 5 else None, num_tokens=1, num_input_tokens=5, logprobs=[entry])

    monkeypatch.setattr(qwen.script, "stream", stream)
    body = BODIES[RESPONSES] | {"model": "m", "top_logprobs": 1}
    for output in (
        qwen.ask(RESPONSES, body).json["output"],
        qwen.events(RESPONSES, body)[-1]["response"]["output"],
    ):
        assert [item["type"] for item in output] == ["reasoning", "message"]
        assert [token["token"] for token in output[1]["content"][0]["logprobs"]] == ["b", "c"]
    chat = qwen.ask(CHAT, BODIES[CHAT] | {"model": "m", "logprobs": True}).json["choices"][0]
    assert [token["token"] for token in chat["logprobs"]["content"]] == words
