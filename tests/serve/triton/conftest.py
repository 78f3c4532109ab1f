"""One server for all tests that leave it as it was, and adapters without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penjing.serve.client.protocol import ENGINE_VARIABLE, MODEL_VARIABLE, PULSE_VARIABLE
from penjing.serve.triton.pulse import Pulse
from tests.serve.triton.serving import SHARED_MEMORY_BYTES, Served, serving
from tests.serve.triton.stand_in import STEP_SECONDS, Adapted, Gate

LIMITS = {"max_num_sequences": 8, "max_waiting_requests": 8}


@pytest.fixture(scope="session")
def tiny_long(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    """The tiny model with a context of 4096 tokens, so that an answer can take seconds."""
    return make_tiny_checkpoint(max_position_embeddings=4096)


@pytest.fixture(scope="session")
def other(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    """The same with other weights."""
    return make_tiny_checkpoint(max_position_embeddings=4096, seed=7)


@pytest.fixture(scope="session")
def server(tiny_long: Path) -> Iterator[Served]:
    """A Triton server with the tiny model: 8 sequences run at once, 8 may wait."""
    with serving(tiny_long, LIMITS, shared_memory_bytes=SHARED_MEMORY_BYTES) as served:
        yield served


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


@pytest.fixture
def gate(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, step = Gate(), adapted.engine.step

    def gated_step() -> Any:
        gate.wait()
        return step()

    monkeypatch.setattr(adapted.engine, "step", gated_step)
    yield gate
    gate.open()
