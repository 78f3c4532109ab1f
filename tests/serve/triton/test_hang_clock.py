"""What is silent because it hangs is told from what gets no processor time, without waiting for either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from penjing.serve.triton.hang_clock import LOOK_SECONDS, HangClock, ThreadState, thread_states
from tests.serve.triton.serving import wait_until

ENDLESS = "while True: pass"


class Machine:
    """A process with a few threads, and the clock that watches it; time passes when it is told to."""

    def __init__(self, **shares: float | None) -> None:
        """`shares`: the part of a processor that each thread gets; None is one that waits for something else."""
        self.shares = list(shares.values())
        self.now = 1000.0
        self.clock = HangClock(5.0, 60.0, self.look)
        self.last_life = self.now
        self._cpu = [0.0] * len(self.shares)
        assert self.clock.verdict(1, self.now, 0.0) is None

    def look(self, pid: int) -> Mapping[int, ThreadState]:
        return {i: ThreadState(share is not None, self._cpu[i]) for i, share in enumerate(self.shares)}

    def seconds_to_verdict(self, limit: float, poll: float = 0.05) -> tuple[float, str | None]:
        """Of silence from now on, looked at each `poll` seconds."""
        begun = self.now
        while self.now - begun < limit:
            self.now += poll
            self._cpu = [cpu + poll * (share or 0.0) for cpu, share in zip(self._cpu, self.shares, strict=True)]
            if verdict := self.clock.verdict(1, self.now, self.now - self.last_life):
                return self.now - begun, verdict
        return limit, None


@pytest.mark.parametrize(
    "shares",
    [{"deadlocked": None}, {"endless": 1.0}, {"deadlocked": None, "endless": 0.99}, {}],
    ids=["deadlocked", "computes without an end", "both", "no threads can be seen"],
)
def test_a_process_that_could_speak_hangs(shares: dict[str, float | None]) -> None:
    seconds, verdict = Machine(**shares).seconds_to_verdict(60)
    assert 5.0 < seconds <= 5.0 + 2 * LOOK_SECONDS
    assert verdict is not None
    assert verdict.startswith("has hung for 5.")


def test_a_starved_process_does_not_hang() -> None:
    """A hundred others want the same processors: five seconds of it come in minutes."""
    starved = Machine(holds_the_lock=0.02, waits_for_it=None)
    assert starved.seconds_to_verdict(30) == (30, None)
    seconds, verdict = starved.seconds_to_verdict(60)
    assert 60 < 30 + seconds < 65
    assert verdict == "has waited 60 s for a processor without a sign of life"


def test_a_process_with_a_part_of_a_processor_has_the_longer_time() -> None:
    seconds, verdict = Machine(one=0.5, other=0.5).seconds_to_verdict(60)
    assert 9 < seconds < 11
    assert verdict is not None
    assert verdict.startswith("has hung")


def test_who_looks_late_was_starved_too() -> None:
    seconds, verdict = Machine(deadlocked=None).seconds_to_verdict(200, poll=3.0)
    assert seconds >= 9 * 3.0  # each look counts for half a second
    assert verdict is not None


def test_a_pause_of_everybody_is_nobodys_fault() -> None:
    machine = Machine(deadlocked=None)
    machine.now += 600.0  # a virtual machine was stopped; the model shows life a moment after
    assert machine.clock.verdict(1, machine.now, 600.0) is None
    machine.now += 0.05
    assert machine.clock.verdict(1, machine.now, 600.05) is None


def test_life_begins_the_count_anew() -> None:
    machine = Machine(deadlocked=None)
    for _ in range(3):
        assert machine.seconds_to_verdict(4.5)[1] is None
        machine.last_life = machine.now
    assert machine.seconds_to_verdict(60)[0] > 5.0


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_threads_are_seen_as_they_are() -> None:
    def state(process: subprocess.Popen[bytes]) -> ThreadState:
        return thread_states(process.pid)[process.pid]

    with running(ENDLESS) as endless, running("import time; time.sleep(1000)") as idle:
        wait_until(lambda: state(endless).cpu_seconds > 0.05, 60, "computing")
        assert state(endless).runnable
        wait_until(lambda: not state(idle).runnable, 60, "sleep")
        os.kill(endless.pid, signal.SIGSTOP)
        wait_until(lambda: not state(endless).runnable, 60, "the stop")
    assert len(thread_states(os.getpid())) >= 1
    assert thread_states(endless.pid) == {}


def test_a_process_that_really_starves_is_left_alone() -> None:
    """The weakest class of the scheduler, beside another process on the only processor that it may use."""
    processor = {min(os.sched_getaffinity(0))}
    with running(ENDLESS) as greedy, running(ENDLESS) as starved:
        for process in (greedy, starved):
            os.sched_setaffinity(process.pid, processor)
        os.sched_setscheduler(starved.pid, os.SCHED_IDLE, os.sched_param(0))
        begun = time.monotonic()
        clock = HangClock(3.0, 3.0)
        while (verdict := clock.verdict(starved.pid, (now := time.monotonic()), now - begun)) is None:
            time.sleep(0.05)
    assert "for a processor" in verdict
