"""How long a process has been silent although it could have spoken: starved is not hung."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 0.25  # between two looks; processor time is counted in hundredths of a second
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ThreadState(NamedTuple):
    """Whether a thread runs or waits for a processor, and the processor time (s) that it has had."""

    runnable: bool
    cpu_seconds: float


def thread_states(pid: int) -> dict[int, ThreadState]:
    """Of the threads of a process, by their ids; empty where it has ended."""
    found = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):  # this one has just ended
                fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                found[int(thread)] = ThreadState(fields[0] == "R", ticks / _TICKS_PER_SECOND)
    return found


class HangClock:
    """Judges the silence of one process: whether it hangs, or the machine leaves it no time to speak.

    Two kinds of time are not counted as its own silence. While a thread is ready to run and gets no processor it may
    hold what the others wait for. And when this process looks late, it was kept from running too, so that of the time
    between two looks no more counts than two looks should take. A process that is deadlocked, that computes without an
    end or that a signal has stopped gets no such credit.

    Args:
        hang_timeout: seconds of its own silence.
        starve_timeout: seconds of waiting for a processor beside them.
        look: the threads of a process, by their ids.
    """

    def __init__(
        self,
        hang_timeout: float,
        starve_timeout: float,
        look: Callable[[int], Mapping[int, ThreadState]] = thread_states,
    ) -> None:
        self._hang_timeout, self._starve_timeout, self._look = hang_timeout, starve_timeout, look
        self._looked_at = 0.0
        self._silent = self._starved = 0.0
        self._before: Mapping[int, ThreadState] = {}

    def verdict(self, pid: int, now: float, since_life: float) -> str | None:
        """What is wrong with the process, in words, a quarter of a second late at most; to be called often.

        Args:
            now: of `time.monotonic`.
            since_life: seconds since it last showed life.
        """
        passed = now - self._looked_at
        if since_life <= passed:  # it has shown life since the last look
            self._looked_at, self._before = now, {}
            self._silent, self._starved = min(since_life, LOOK_SECONDS), 0.0
        elif passed >= LOOK_SECONDS:
            threads = self._look(pid)
            known = threads.keys() & self._before.keys()
            counted = min(passed, 2 * LOOK_SECONDS)
            waited = max((_waited(self._before[key], threads[key], passed) for key in known), default=0.0)
            waited = min(waited, counted)
            self._silent += counted - waited
            self._starved += waited
            self._looked_at, self._before = now, threads
        if self._silent > self._hang_timeout:
            return f"has hung for {self._silent:.1f} s"
        if self._starved > self._starve_timeout:
            return f"has waited {self._starved:.0f} s for a processor without a sign of life"
        return None


def _waited(before: ThreadState, after: ThreadState, seconds: float) -> float:
    """Seconds for which a thread waited for a processor between two looks."""
    if not (before.runnable and after.runnable):
        return 0.0
    return max(0.0, seconds - (after.cpu_seconds - before.cpu_seconds))
