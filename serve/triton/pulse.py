"""A page of memory that the served model and its supervisor share: signs of life one way, a command the other.

Health of Triton server says nothing about the Python process behind a model, which may be dead or stuck. That process
writes here what only it can know; the supervisor reads it twenty times a second without asking anybody.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum
from pathlib import Path

from penjing.serve.client.protocol import PULSE_VARIABLE

_STUB_PID, _BEAT, _LOOP_BEAT, _PHASE, _COMMAND, _UNANSWERED, _UNSEEN = range(7)
_SIZE = 64  # eight numbers of 64 bits; an aligned one is read and written whole
MODEL_SLOT, EYES_SLOT = range(2)
"""Of the page: where the served model beats, and where what it sees with does, if that is a model of its own."""


def announce(slot: int = MODEL_SLOT) -> None:
    """Show life for the first time. Cheap, so that a model can call it before imports that take seconds: then a process
    that does not start at all is told from one that takes its time."""
    path = os.environ.get(PULSE_VARIABLE)
    if path:
        Pulse(Path(path), slot).beat(loop_beat=time.monotonic(), phase=Phase.LOADING, unanswered=0)


class Phase(IntEnum):
    """Where the served model stands."""

    LOADING = 0
    SERVING = 1
    DRAINED = 2
    FAILED = 3


class Command(IntEnum):
    """What the supervisor wants."""

    SERVE = 0
    DRAIN = 1
    ABORT = 2


class Pulse:
    """The page. Times are seconds of `time.monotonic`, which all processes of a machine share.

    Args:
        path: what another process's `path` said; None makes a page, in memory, where no full disk is in its way.
        slot: which of the processes that share a page this is about.
    """

    def __init__(self, path: Path | None = None, slot: int = MODEL_SLOT) -> None:
        if path is None:
            self._descriptor = os.memfd_create("penjing-pulse")
            os.ftruncate(self._descriptor, _SIZE * (EYES_SLOT + 1))
        else:
            self._descriptor = os.open(path, os.O_RDWR)
        self.path = path or Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        """For processes of the same user, as long as this one has it open."""
        self._memory = mmap.mmap(self._descriptor, _SIZE * (EYES_SLOT + 1))
        self._numbers = memoryview(self._memory)[_SIZE * slot : _SIZE * (slot + 1)].cast("q")

    def close(self) -> None:
        self._numbers.release()
        self._memory.close()
        os.close(self._descriptor)

    def beat(self, *, loop_beat: float, phase: Phase, unanswered: int, unseen: int = 0) -> None:
        """The model lives: `loop_beat` is when its engine loop last passed, `unanswered` how many requests it owes, of
        which `unseen` wait for what another model makes of their images."""
        numbers = self._numbers
        numbers[_UNSEEN] = unseen
        numbers[_LOOP_BEAT] = int(loop_beat * 1e9)
        numbers[_UNANSWERED] = unanswered
        numbers[_PHASE] = phase
        numbers[_BEAT] = time.monotonic_ns()
        numbers[_STUB_PID] = os.getpid()

    @property
    def stub_pid(self) -> int:
        """Process that hosts the model; 0 until its first beat."""
        return self._numbers[_STUB_PID]

    @property
    def phase(self) -> Phase:
        return Phase(self._numbers[_PHASE])

    @property
    def unanswered(self) -> int:
        return self._numbers[_UNANSWERED]

    @property
    def unseen(self) -> int:
        return self._numbers[_UNSEEN]

    def beat_age(self) -> float:
        """Seconds since the model's process last showed life."""
        return (time.monotonic_ns() - self._numbers[_BEAT]) / 1e9

    def loop_age(self) -> float:
        """Seconds since the engine loop last passed."""
        return (time.monotonic_ns() - self._numbers[_LOOP_BEAT]) / 1e9

    @property
    def command(self) -> Command:
        return Command(self._numbers[_COMMAND])

    @command.setter
    def command(self, command: Command) -> None:
        self._numbers[_COMMAND] = command
