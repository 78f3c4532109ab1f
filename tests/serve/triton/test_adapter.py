"""The adapter beside a stand-in for Triton server's Python module: what the server would be sent, and when."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penjing.core.errors import InputError
from penjing.core.text.chat import ChatTemplate
from penjing.serve.client.protocol import ENGINE_VARIABLE, MODEL_VARIABLE, PULSE_VARIABLE
from penjing.serve.triton.adapter import LLMAdapter
from tests.serve.triton.serving import wait_until
from tests.serve.triton.stand_in import GREEDY, Adapted, Gate, Module, request


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_are_free_two_steps_after_the_client_left(adapted: Adapted, gate: Gate, stream: bool) -> None:
    sender = adapted.ask(text_input="a b c", stream=stream, sampling_parameters={"max_tokens": 2000, **GREEDY})
    gate.allow(5)
    wait_until(lambda: adapted.engine.stats().num_steps >= 5, 60, "five steps")
    assert adapted.engine.stats().num_blocks_used > 0
    sender.cancelled = True
    loop = adapted.adapter._loop
    wait_until(lambda: loop is not None and loop._cancelled, 60, "the sight of it, while a step runs")
    gate.allow(2)
    wait_until(lambda: adapted.engine.stats().num_blocks_used == 0, 60, "the end of the request")
    assert sender.done.wait(60)
    assert sender.finals == 1
    assert sender.error().code == "cancelled"


def test_tokens_are_joined_when_sending_is_slower_than_the_engine(adapted: Adapted) -> None:
    quick = adapted.ask(text_input="a tree", stream=True, sampling_parameters={"max_tokens": 60, **GREEDY})
    assert quick.done.wait(60)
    laggard = request(text_input="a tree", stream=True, sampling_parameters={"max_tokens": 60, **GREEDY})
    laggard.sender.slow = 0.05
    adapted.adapter.execute([laggard])
    assert laggard.sender.done.wait(60)
    assert laggard.sender.text() == quick.text()
    assert len(laggard.sender.responses) < 40
    assert laggard.sender.finals == quick.finals == 1


def test_errors_have_codes_and_end_the_request(adapted: Adapted) -> None:
    cases = [
        ({"text_input": "a", "sampling_parameters": {"top_k": -7}}, "invalid", "INVALID_ARGUMENT: "),
        ({"text_input": "a", "parameters": {"top_k": -7}}, "invalid", "top_k must be"),
        ({"text_input": np.float32(3)}, "invalid", "text_input must be a TYPE_STRING tensor"),
        ({"text_input": "a", "stream": [True, False]}, "invalid", "stream must hold one element"),
        ({"messages": '[{"role": "user", "content": "hi"}, {"role": 1, "content": ""}]'}, "invalid", r"messages[1]"),
    ]
    for inputs, code, words in cases:
        sender = adapted.ask(**inputs)
        assert sender.done.wait(60)
        assert sender.finals == len(sender.responses) == 1
        assert sender.error().code == code
        assert words in str(sender.error())
    assert adapted.pulse.unanswered == 0


def test_a_prompt_of_token_ids_is_answered_and_shown_as_text(adapted: Adapted) -> None:
    ids = adapted.engine.tokenizer.encode("a tree in a pot")
    sampling = {"max_tokens": 8, "prompt_logprobs": 0, **GREEDY}
    flags = {"return_num_cached_tokens": True, "return_prompt_logprobs": True, "exclude_input_in_output": False}
    text = adapted.ask(text_input="a tree in a pot", sampling_parameters=sampling, **flags)
    assert text.done.wait(60)
    tokens = adapted.ask(prompt_token_ids=np.array(ids, np.int32), sampling_parameters=sampling, **flags)
    assert tokens.done.wait(60)
    assert tokens.error() is None
    assert tokens.text() == text.text()
    assert tokens.text().startswith("a tree in a pot")
    first, *rest = json.loads(tokens.responses[-1].tensors["prompt_logprobs"][0])
    assert first is None
    assert [list(entry) for entry in rest] == [[str(token)] for token in ids[1:]]
    assert tokens.responses[-1].tensors["num_cached_tokens"].tolist() == [0], "what is scored is computed"
    long = "a tree in a pot " * 8
    for expected in (False, True):
        sender = adapted.ask(text_input=long, sampling_parameters={"max_tokens": 1}, return_num_cached_tokens=True)
        assert sender.done.wait(60)
        assert bool(sender.responses[-1].tensors["num_cached_tokens"][0]) == expected


def test_messages_for_a_model_that_does_not_chat_are_told_how_to_ask_it(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapted.adapter, "_chat_template", None)
    sender = adapted.ask(messages='[{"role": "user", "content": "hi"}]')
    assert sender.done.wait(60)
    assert "send it a prompt (text_input, by HTTP /v1/completions)" in str(sender.error())


def test_a_chat_template_gets_the_variables_of_a_request(adapted: Adapted) -> None:
    source = "{% for tool in tools %}[{{ tool.name }}]{% endfor %}{{ messages[0].content }}"
    adapted.adapter._chat_template = ChatTemplate(source, "test")
    asked = {
        "messages": json.dumps([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        "chat_template_kwargs": {"tools": [{"name": "prune"}, {"name": "water"}]},
        "exclude_input_in_output": False,
        "sampling_parameters": {"max_tokens": 1},
    }
    sender = adapted.ask(**asked)
    assert sender.done.wait(60)
    assert sender.text().startswith("[prune][water]hi")
    sender = adapted.ask(**asked | {"chat_template_kwargs": "[1]"})
    assert sender.done.wait(60)
    assert "must be a JSON object" in str(sender.error())


def test_while_a_long_prompt_is_read_others_are_answered(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, reading, go_on = adapted.engine.tokenizer, threading.Event(), threading.Event()
    encode = tokenizer.encode_beside

    def slow_encode(text: str, add_special: bool = True) -> list[int]:
        if len(text) > 5000:
            reading.set()
            assert go_on.wait(60)
        return encode(text, add_special)

    monkeypatch.setattr(tokenizer, "encode_beside", slow_encode)
    refused, left = (adapted.ask(text_input=f"{i}" + "a" * 7000) for i in range(2))
    assert reading.wait(60)
    short = adapted.ask(text_input="a", sampling_parameters={"max_tokens": 2, **GREEDY})
    assert short.done.wait(60)
    assert short.error() is None
    left.cancelled = True
    wait_until(lambda: any(reply.client_left for reply in adapted.adapter._live.values()), 60, "the sight of it")
    go_on.set()
    assert refused.done.wait(60)
    assert refused.error().code == "invalid"
    assert "7001 tokens; with a context of 4080" in str(refused.error())
    assert left.done.wait(60)
    assert left.error().code == "cancelled"
    wait_until(lambda: adapted.pulse.unanswered == 0, 60, "no debt")


def test_a_prompt_of_too_many_bytes_is_refused_unread(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted.engine.tokenizer, "encode_beside", None)
    most = adapted.engine.preparer.max_prompt_bytes
    cases = {"text_input": "a" * (most + 1), "messages": " " * (6 * most + (4 << 20) + 1)}
    for name, text in cases.items():
        sender = adapted.ask(**{name: text})
        assert sender.done.wait(60)
        assert sender.error().code == "invalid"
        assert f"has {len(text)} bytes, at most" in str(sender.error())


def test_a_defect_in_one_request_stays_there(adapted: Adapted) -> None:
    broken = request(text_input="a")
    broken.inputs = lambda: 1 / 0
    adapted.adapter.execute([broken])
    assert broken.sender.error().code == "internal"
    assert "ZeroDivisionError" in str(broken.sender.error())
    sender = adapted.ask(text_input="a", sampling_parameters={"max_tokens": 1, **GREEDY})
    assert sender.done.wait(60)
    assert sender.error() is None


def test_what_cannot_be_sent_does_not_stop_the_sender(adapted: Adapted) -> None:
    broken = request(text_input="a", sampling_parameters={"max_tokens": 1, **GREEDY})
    failed = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        failed.set()
        raise RuntimeError("the server is gone")

    broken.sender.send = fail
    adapted.adapter.execute([broken])
    assert failed.wait(60)
    assert adapted.ask(text_input="a", sampling_parameters={"max_tokens": 1, **GREEDY}).done.wait(60)


def test_the_model_must_be_named_and_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (MODEL_VARIABLE, ENGINE_VARIABLE, PULSE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    arguments = {"model_config": "{}", "model_name": "llm"}
    with pytest.raises(InputError, match=MODEL_VARIABLE):
        LLMAdapter(arguments, Module())
    arguments["model_config"] = json.dumps({"parameters": {"model": {"string_value": str(tmp_path / "nowhere")}}})
    with pytest.raises(InputError, match="nowhere"):
        LLMAdapter(arguments, Module())


def test_model_py_is_short() -> None:
    import penjing.model_repository

    lines: Callable[[Path], int] = lambda path: len(path.read_text().splitlines())  # noqa: E731
    for file in Path(penjing.model_repository.__path__[0]).glob("*/1/model.py"):
        assert lines(file) < 60
