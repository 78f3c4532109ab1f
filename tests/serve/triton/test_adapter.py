"""The adapter beside a stand-in for Triton server's Python module: what the server would be sent, and when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penjing.core.errors import InputError
from penjing.core.text.chat import ChatTemplate
from penjing.serve.client.protocol import ENGINE_VARIABLE, MODEL_VARIABLE, PULSE_VARIABLE
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.triton.adapter import LLMAdapter
from penjing.serve.triton.metrics import COUNTERS, GAUGES, HISTOGRAMS, REASONS
from penjing.serve.triton.pulse import Command, Phase, Pulse
from tests.serve.triton.serving import wait_until

FINAL = 1
STEP_SECONDS = 0.03  # of a model of some size; the adapter looks for clients that left every 0.01 s
GREEDY = {"temperature": 0, "ignore_eos": True}


class Sender:
    """What a request got; fails on a use that ends Triton server."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.finals = 0
        self.cancelled = False
        self.done = threading.Event()
        self.slow = 0.0

    def send(self, response: Any, flags: int = 0) -> None:
        assert not self.finals, "nothing may follow FINAL"
        time.sleep(self.slow)
        self.responses.append(response)
        self.finals += flags == FINAL
        if self.finals:
            self.done.set()

    def is_cancelled(self) -> bool:
        assert not self.finals, "asked after FINAL: Triton server would crash"
        return self.cancelled

    def text(self) -> str:
        return "".join(response.tensors["text_output"][0].decode() for response in self.responses)

    def error(self) -> Any:
        return self.responses[-1].error


class Metric:
    def __init__(self) -> None:
        self.value, self.samples = 0.0, []

    def set(self, value: float) -> None:
        self.value = value

    def increment(self, value: float) -> None:
        assert value > 0
        self.value += value

    def observe(self, value: float) -> None:
        self.samples.append(value)


class Module:
    """The part of `triton_python_backend_utils` that the adapter uses."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    TritonModelException = RuntimeError

    def __init__(self) -> None:
        metrics: dict[str, Metric] = {}
        self.metrics = metrics

        class Family:
            COUNTER, GAUGE, HISTOGRAM = range(3)

            def __init__(self, name: str, description: str, kind: int) -> None:
                self.name = name

            def Metric(self, labels: dict[str, str], buckets: Any = None) -> Metric:  # noqa: N802 (its name there)
                metric = metrics[self.name + labels.get("finished_reason", "") + labels.get("reason", "")] = Metric()
                return metric

        class TritonError(Exception):
            INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "invalid", "unavailable", "internal", "cancelled"

            def __init__(self, message: str, code: str) -> None:
                super().__init__(message)
                self.code = code

        self.MetricFamily, self.TritonError = Family, TritonError

    @staticmethod
    def Tensor(name: str, value: np.ndarray) -> Any:  # noqa: N802
        return name, value

    @staticmethod
    def InferenceResponse(output_tensors: Any = (), error: Any = None) -> Any:  # noqa: N802
        return SimpleNamespace(tensors=dict(output_tensors), error=error)


def request(timeout_us: int = 0, parameters: dict[str, Any] | None = None, **inputs: Any) -> Any:
    sender = Sender()
    tensors = []
    for name, value in inputs.items():
        value = json.dumps(value) if isinstance(value, dict) else value
        if isinstance(value, str):
            array = np.array([value.encode()], np.object_)
        else:
            array = value if isinstance(value, np.ndarray) else np.array([value])
        tensors.append(SimpleNamespace(name=lambda name=name: name, as_numpy=lambda array=array: array))
    return SimpleNamespace(
        sender=sender,
        get_response_sender=lambda: sender,
        inputs=lambda: tensors,
        parameters=lambda: json.dumps(parameters or {}),
        timeout=lambda: timeout_us,
    )


class Adapted:
    """An adapter whose engine takes `STEP_SECONDS` a step when asked to."""

    def __init__(self, pulse: Pulse) -> None:
        self.module = Module()
        self.pulse = pulse
        self.adapter = LLMAdapter({"model_config": "{}", "model_name": "llm"}, self.module)
        assert self.adapter._loop is not None
        self.engine: LLMEngine = self.adapter._loop.engine

    def ask(self, **arguments: Any) -> Sender:
        asked = request(**arguments)
        self.adapter.execute([asked])
        return asked.sender


@pytest.fixture
def adapted(tiny_long: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapted]:
    monkeypatch.setenv(MODEL_VARIABLE, str(tiny_long))
    monkeypatch.setenv(ENGINE_VARIABLE, '{"num_blocks": 256}')
    pulse = Pulse()
    monkeypatch.setenv(PULSE_VARIABLE, str(pulse.path))
    adapted = Adapted(pulse)
    yield adapted
    adapted.adapter.finalize()


@pytest.fixture
def slow(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> Adapted:
    step = adapted.engine.step

    def slow_step() -> Any:
        time.sleep(STEP_SECONDS)
        return step()

    monkeypatch.setattr(adapted.engine, "step", slow_step)
    return adapted


class Gate:
    """Lets an engine step as often as a test says, and no more."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False

    def allow(self, steps: int) -> None:
        self._steps.release(steps)

    def open(self) -> None:
        self._open = True
        self._steps.release()

    def wait(self) -> None:
        if not self._open:
            assert self._steps.acquire(timeout=60)


@pytest.fixture
def gate(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, step = Gate(), adapted.engine.step

    def gated_step() -> Any:
        gate.wait()
        return step()

    monkeypatch.setattr(adapted.engine, "step", gated_step)
    yield gate
    gate.open()


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_are_free_two_steps_after_the_client_left(adapted: Adapted, gate: Gate, stream: bool) -> None:
    sender = adapted.ask(text_input="a b c", stream=stream, sampling_parameters={"max_tokens": 2000, **GREEDY})
    gate.allow(5)
    wait_until(lambda: adapted.engine.stats().num_steps >= 5, 10, "five steps")
    assert adapted.engine.stats().num_blocks_used > 0
    sender.cancelled = True
    loop = adapted.adapter._loop
    wait_until(lambda: loop is not None and loop._cancelled, 10, "the sight of it, while a step runs")
    gate.allow(2)
    wait_until(lambda: adapted.engine.stats().num_blocks_used == 0, 10, "the end of the request")
    assert sender.done.wait(5)
    assert sender.finals == 1
    assert sender.error().code == "cancelled"


def test_tokens_are_joined_when_sending_is_slower_than_the_engine(adapted: Adapted) -> None:
    quick = adapted.ask(text_input="a tree", stream=True, sampling_parameters={"max_tokens": 60, **GREEDY})
    assert quick.done.wait(20)
    laggard = request(text_input="a tree", stream=True, sampling_parameters={"max_tokens": 60, **GREEDY})
    laggard.sender.slow = 0.05
    adapted.adapter.execute([laggard])
    assert laggard.sender.done.wait(20)
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
        assert sender.done.wait(5)
        assert sender.finals == len(sender.responses) == 1
        assert sender.error().code == code
        assert words in str(sender.error())
    assert adapted.pulse.unanswered == 0


def test_a_prompt_of_token_ids_is_answered_and_shown_as_text(adapted: Adapted) -> None:
    ids = adapted.engine.tokenizer.encode("a tree in a pot")
    sampling = {"max_tokens": 8, "prompt_logprobs": 0, **GREEDY}
    flags = {"return_num_cached_tokens": True, "return_prompt_logprobs": True, "exclude_input_in_output": False}
    text = adapted.ask(text_input="a tree in a pot", sampling_parameters=sampling, **flags)
    assert text.done.wait(10)
    tokens = adapted.ask(prompt_token_ids=np.array(ids, np.int32), sampling_parameters=sampling, **flags)
    assert tokens.done.wait(10)
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
        assert sender.done.wait(10)
        assert bool(sender.responses[-1].tensors["num_cached_tokens"][0]) == expected


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
    assert sender.done.wait(10)
    assert sender.text().startswith("[prune][water]hi")
    sender = adapted.ask(**asked | {"chat_template_kwargs": "[1]"})
    assert sender.done.wait(10)
    assert "must be a JSON object" in str(sender.error())


def test_while_a_long_prompt_is_read_others_are_answered(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, reading, go_on = adapted.engine.tokenizer, threading.Event(), threading.Event()
    encode = tokenizer.encode_beside

    def slow_encode(text: str, add_special: bool = True) -> list[int]:
        if len(text) > 5000:
            reading.set()
            assert go_on.wait(30)
        return encode(text, add_special)

    monkeypatch.setattr(tokenizer, "encode_beside", slow_encode)
    refused, left = (adapted.ask(text_input=f"{i}" + "a" * 7000) for i in range(2))
    assert reading.wait(10)
    short = adapted.ask(text_input="a", sampling_parameters={"max_tokens": 2, **GREEDY})
    assert short.done.wait(10)
    assert short.error() is None
    left.cancelled = True
    wait_until(lambda: any(reply.client_left for reply in adapted.adapter._live.values()), 10, "the sight of it")
    go_on.set()
    assert refused.done.wait(10)
    assert refused.error().code == "invalid"
    assert "7001 tokens; with a context of 4080" in str(refused.error())
    assert left.done.wait(10)
    assert left.error().code == "cancelled"
    wait_until(lambda: adapted.pulse.unanswered == 0, 5, "no debt")


def test_a_prompt_of_too_many_bytes_is_refused_unread(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted.engine.tokenizer, "encode_beside", None)
    most = adapted.engine.preparer.max_prompt_bytes
    cases = {"text_input": "a" * (most + 1), "messages": " " * (6 * most + (4 << 20) + 1)}
    for name, text in cases.items():
        sender = adapted.ask(**{name: text})
        assert sender.done.wait(10)
        assert sender.error().code == "invalid"
        assert f"has {len(text)} bytes, at most" in str(sender.error())


def test_a_defect_in_one_request_stays_there(adapted: Adapted) -> None:
    broken = request(text_input="a")
    broken.inputs = lambda: 1 / 0
    adapted.adapter.execute([broken])
    assert broken.sender.error().code == "internal"
    assert "ZeroDivisionError" in str(broken.sender.error())
    sender = adapted.ask(text_input="a", sampling_parameters={"max_tokens": 1, **GREEDY})
    assert sender.done.wait(5)
    assert sender.error() is None


def test_what_cannot_be_sent_does_not_stop_the_sender(adapted: Adapted) -> None:
    broken = request(text_input="a", sampling_parameters={"max_tokens": 1, **GREEDY})
    failed = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        failed.set()
        raise RuntimeError("the server is gone")

    broken.sender.send = fail
    adapted.adapter.execute([broken])
    assert failed.wait(5)
    assert adapted.ask(text_input="a", sampling_parameters={"max_tokens": 1, **GREEDY}).done.wait(5)


def test_a_request_whose_time_is_up_is_ended(slow: Adapted) -> None:
    sender = slow.ask(text_input="a", timeout_us=200_000, sampling_parameters={"max_tokens": 2000, **GREEDY})
    assert sender.done.wait(5)
    assert sender.error().code == "unavailable"
    wait_until(lambda: slow.engine.stats().num_blocks_used == 0, 5, "the end of the request")


def test_the_pulse_tells_life_and_takes_commands(adapted: Adapted, gate: Gate) -> None:
    pulse = adapted.pulse
    wait_until(lambda: pulse.phase is Phase.SERVING, 5, "serving")
    assert pulse.stub_pid > 0
    assert pulse.beat_age() < 2
    assert pulse.loop_age() < 2
    assert adapted.ask(parameters={"ping": True}).error() is None
    sender = adapted.ask(text_input="a", stream=True, sampling_parameters={"max_tokens": 20, **GREEDY})
    wait_until(lambda: pulse.unanswered == 1, 5, "the count of what is owed")
    pulse.command = Command.DRAIN
    wait_until(lambda: adapted.ask(parameters={"ping": True}).error() is not None, 5, "the refusal of pings")
    assert adapted.ask(text_input="late").error().code == "unavailable"
    assert pulse.phase is not Phase.DRAINED
    gate.open()
    assert sender.done.wait(10)
    assert sender.responses[-1].error is None  # not truncated
    wait_until(lambda: pulse.phase is Phase.DRAINED, 5, "drained")


def test_abort_ends_what_runs(slow: Adapted) -> None:
    sender = slow.ask(text_input="a", stream=True, sampling_parameters={"max_tokens": 2000, **GREEDY})
    slow.pulse.command = Command.ABORT
    assert sender.done.wait(5)
    assert sender.error().code == "unavailable"
    assert "shuts down" in str(sender.error())
    wait_until(lambda: slow.pulse.phase is Phase.DRAINED, 5, "drained")


def test_every_metric_is_registered_and_follows_the_engine(adapted: Adapted) -> None:
    metrics = adapted.module.metrics
    names = {*GAUGES, *COUNTERS, *HISTOGRAMS} | {f"request_success{reason}" for reason in ("stop", "length", "abort")}
    assert {f"penjing:{name}" for name in names} <= set(metrics)
    assert metrics["penjing:generation_tokens"].value == 0  # the canary does not count
    assert adapted.ask(text_input="ab", sampling_parameters={"max_tokens": 5, **GREEDY}).done.wait(5)
    steps = metrics["penjing:iteration_tokens_total"].samples  # the last that is brought up to date
    wait_until(lambda: len(steps) == 5, 5, "the metrics")
    assert metrics["penjing:generation_tokens"].value == 5
    assert metrics["penjing:prompt_tokens"].value == 2
    assert len(metrics["penjing:time_to_first_token_seconds"].samples) == 1
    assert len(metrics["penjing:time_per_output_token_seconds"].samples) == 4
    assert steps == [2, 1, 1, 1, 1]


def test_refusals_are_counted_by_reason(adapted: Adapted) -> None:
    metrics = adapted.module.metrics
    for wrong in ({"top_p": 0}, {"temperature": -1}):
        assert adapted.ask(text_input="a", sampling_parameters=wrong).done.wait(5)
    late = adapted.ask(text_input="a", sampling_parameters={"max_tokens": 4000, **GREEDY}, timeout_us=1000)
    assert late.done.wait(10)
    adapted.pulse.command = Command.DRAIN
    wait_until(lambda: adapted.adapter._refusing, 5, "the drain")
    adapted.adapter._metrics.update(  # type: ignore[union-attr] # from a drain on it is not brought up to date by itself
        adapted.adapter._loop.stats(),  # type: ignore[union-attr]
        {},
        adapted.adapter._refusals.snapshot(),
    )
    assert adapted.ask(text_input="a").done.wait(5)
    counts = adapted.adapter._refusals.snapshot()
    assert counts == {"invalid": 2, "timeout": 1, "unavailable": 1}
    shown = {name: metrics[f"penjing:requests_refused{name}"].value for name in REASONS}
    assert shown == {"invalid": 2, "overloaded": 0, "unavailable": 0, "error": 0, "timeout": 1}


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
