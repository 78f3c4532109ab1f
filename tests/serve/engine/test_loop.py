"""The loop thread: submissions and cancellations from any thread, failures that are told, drain and stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest

from penjing.core.errors import OverloadedError, RequestError, ServerError
from penjing.serve.engine.loop import EngineLoop
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import tiny_engine

PROMPT = list(b"a prompt")
LONG = SamplingParams(max_tokens=None, ignore_eos=True)


class Inbox(Queue):
    """Collects one request's outputs; `answer` waits for the last of `n`."""

    def __call__(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.put(output)

    def answer(self, n: int = 1) -> list[RequestOutput]:
        outputs, finished = [], 0
        while finished < n:
            outputs.append(self.get(timeout=20))
            finished += outputs[-1].finish_reason is not None
        return outputs


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = EngineLoop(tiny_engine())
    loop.start()
    yield loop
    loop.stop()


def submit(loop: EngineLoop, name: str, params: SamplingParams | None = None) -> Inbox:
    inbox = Inbox()
    loop.submit(Request(name, PROMPT, params or SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)), inbox)
    return inbox


def test_requests_of_many_threads_are_all_answered_alike(loop: EngineLoop) -> None:
    answers: dict[str, list[int]] = {}

    def client(name: str) -> None:
        for i in range(3):
            outputs = submit(loop, f"{name}-{i}").answer()
            answers[f"{name}-{i}"] = [token_id for output in outputs for token_id in output.token_ids]

    threads = [threading.Thread(target=client, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 24
    assert len({tuple(answer) for answer in answers.values()}) == 1


def test_an_invalid_request_fails_in_the_callers_thread(loop: EngineLoop) -> None:
    with pytest.raises(RequestError, match="empty"):
        loop.submit(Request("r", ""), Inbox())
    inbox = submit(loop, "same", LONG)
    with pytest.raises(RequestError, match="in use"):
        submit(loop, "same")
    loop.cancel("same")
    assert inbox.answer()[-1].finish_reason == "abort"
    submit(loop, "same").answer()  # the id is free again


def test_overload_is_refused_in_the_callers_thread() -> None:
    loop = EngineLoop(tiny_engine(max_waiting_requests=2))  # not started: everything waits
    submit(loop, "a")
    submit(loop, "b")
    with pytest.raises(OverloadedError, match="retry in"):
        submit(loop, "c")


def test_cancel_ends_an_answer_and_frees_its_blocks(loop: EngineLoop) -> None:
    inbox = submit(loop, "r", LONG)
    inbox.get(timeout=20)
    loop.cancel("r")
    assert inbox.answer()[-1].finish_reason == "abort"
    assert loop.stats().num_blocks_used == 0
    loop.cancel("unknown")
    submit(loop, "next").answer()


def test_cancel_frees_blocks_within_two_steps() -> None:
    """Single-stepped: the step in progress may end, no other begins."""
    engine = tiny_engine()
    loop = EngineLoop(engine)
    step, stepped, go = engine.step, threading.Semaphore(0), threading.Semaphore(0)

    def single_step() -> list[RequestOutput]:
        go.acquire()
        outputs = step()
        stepped.release()
        return outputs

    engine.step = single_step  # type: ignore[method-assign]
    inbox = submit(loop, "r", LONG)
    loop.start()
    go.release()
    stepped.acquire()
    loop.cancel("r")
    go.release()  # the step that may have begun
    assert inbox.answer()[-1].finish_reason == "abort"
    assert engine.stats().num_steps <= 2
    assert engine.stats().num_blocks_used == 0
    loop.stop()


def test_a_callback_that_fails_ends_its_own_request_alone(loop: EngineLoop) -> None:
    def failing(outputs: list[RequestOutput]) -> None:
        raise ValueError("the client is gone")

    loop.submit(Request("bad", PROMPT, LONG), failing)
    assert submit(loop, "good").answer()[-1].finish_reason == "length"
    assert loop.drain(20)
    assert loop.stats().num_blocks_used == 0


def test_drain_finishes_what_runs_and_refuses_what_comes(loop: EngineLoop) -> None:
    inbox = submit(loop, "r", LONG)
    inbox.get(timeout=20)
    assert not loop.drain(0.0)
    with pytest.raises(ServerError, match="shutting down"):
        submit(loop, "late")
    assert loop.drain(30)
    assert inbox.answer()[-1].finish_reason == "length", "not truncated"


def test_stop_tells_everyone() -> None:
    loop = EngineLoop(tiny_engine(max_num_sequences=1))
    loop.start()
    inboxes = [submit(loop, str(i), LONG) for i in range(3)]
    inboxes[0].get(timeout=20)
    loop.stop()
    assert [inbox.answer()[-1].finish_reason for inbox in inboxes] == ["abort"] * 3
    with pytest.raises(ServerError):
        submit(loop, "late")


def test_a_defect_fails_the_requests_in_flight_and_the_next_one_is_served(loop: EngineLoop) -> None:
    schedule = loop.engine.scheduler.schedule

    def failing(*_: object) -> Any:
        raise IndexError("a defect")

    loop.engine.scheduler.schedule = failing  # type: ignore[method-assign]
    output = submit(loop, "r").answer()[-1]
    assert (output.finish_reason, "a defect" in str(output.error)) == ("error", True)
    assert schedule is not loop.engine.scheduler.schedule, "the scheduler was replaced"
    assert submit(loop, "next").answer()[-1].finish_reason == "length"
    assert loop.failure is None


def test_repeated_defects_make_the_loop_give_up_audibly(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(tiny_engine())
    loop.start()

    def failing(*_: object) -> Any:
        raise IndexError("a defect")

    monkeypatch.setattr("penjing.serve.engine.scheduler.Scheduler.schedule", failing)
    for i in range(3):
        assert submit(loop, str(i)).answer()[-1].finish_reason == "error"
    deadline = time.monotonic() + 20
    while loop.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.failure is not None
    with pytest.raises(ServerError, match="3 steps in a row failed"):
        submit(loop, "late")
    assert loop.drain(1)


def test_broken_invariants_are_found_when_idle(loop: EngineLoop) -> None:
    submit(loop, "r").answer()
    loop.engine.scheduler.blocks.free_blank.pop()
    deadline = time.monotonic() + 20
    while loop.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "inconsistent" in str(loop.failure)


def test_an_idle_loop_beats(loop: EngineLoop) -> None:
    before = loop.heartbeat
    deadline = time.monotonic() + 20
    while loop.heartbeat <= before + 0.2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert loop.heartbeat > before + 0.2
