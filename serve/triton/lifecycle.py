"""The pulse of a model that Triton server calls with one batch after the other: a thread that shows life."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path

from penjing.serve.client.protocol import PULSE_VARIABLE
from penjing.serve.triton.pulse import MODEL_SLOT, Command, Phase, Pulse

BEAT_SECONDS = 0.05


class Life:
    """Beats from the start on, and tells since when a batch has been running. `slot`: see `Pulse`."""

    def __init__(self, slot: int = MODEL_SLOT) -> None:
        self.phase = Phase.LOADING
        self._parent = os.getppid()
        self._running: deque[float] = deque()  # since when; batches end in the order in which they begin
        self._unanswered = 0
        self._counting = threading.Lock()
        pulse = os.environ.get(PULSE_VARIABLE)
        self._pulse = Pulse(Path(pulse), slot) if pulse else None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penjing-pulse", daemon=True)
        self._thread.start()

    def began(self) -> None:
        """A batch runs: if it takes too long, the supervisor acts."""
        self._running.append(time.monotonic())

    def ended(self) -> None:
        """The oldest batch that runs is done."""
        self._running.popleft()

    @property
    def ending(self) -> bool:
        """Whether the supervisor has said that the server ends."""
        return self._pulse is not None and self._pulse.command is not Command.SERVE

    @property
    def unanswered(self) -> int:
        """Requests that came and have no answer yet."""
        return self._unanswered

    def owe(self, num_requests: int) -> None:
        """Count requests that came."""
        with self._counting:
            self._unanswered += num_requests

    def answered(self, num_requests: int) -> None:
        """Count requests that have their answers."""
        self.owe(-num_requests)

    def end(self, phase: Phase) -> None:
        """A last beat with `phase`."""
        self._stopping.set()
        self._thread.join(2)
        self.phase = phase
        self._beat()

    def _run(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        if os.getppid() != self._parent:
            os._exit(1)  # Triton server is gone; the stub alone would notice only after minutes
        if self._pulse is not None:
            oldest = [*self._running][:1]
            self._pulse.beat(loop_beat=(oldest or [time.monotonic()])[0], phase=self.phase, unanswered=self._unanswered)
