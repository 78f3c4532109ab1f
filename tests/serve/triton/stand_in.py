"""A stand-in for Triton server's Python module, and an adapter beside it."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from penjing.serve.engine.engine import LLMEngine
from penjing.serve.triton.adapter import LLMAdapter
from penjing.serve.triton.pulse import Pulse

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
        request_id=lambda: "of-the-client",
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
