"""torchrun as a child that ends with its starter, whichever of the starter's threads started it.

What ties it is its standard input (`agent.py`). A signal of the kernel's at the parent's death (`PR_SET_PDEATHSIG`)
would come when the *thread* ends that started it, prctl(2).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penjing.core.cluster.start import room_for_process

LINES = 1000  # that are kept until somebody asks


class TiedTorchrun:
    """A torchrun that runs.

    Args:
        arguments: of torchrun.
        folder: its working folder.

    Raises:
        SetupError: the machine has no room for another process.
    """

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        with room_for_process():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penjing.train.launch.agent", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=folder,
                start_new_session=True,  # what is done to the starter's process group is not meant for it
            )
        self._lines: deque[str] = deque(maxlen=LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def said(self) -> list[str]:
        """Its lines since this was asked last, at most the last `LINES`."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def wait(self, seconds: float) -> int | None:
        """Its exit status, as a shell gives it; None if it still runs after `seconds`."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(seconds)  # a process that it left behind may hold the pipe
        return code if code >= 0 else 128 - code

    def stop(self, patience: float) -> None:
        """Ask it to end, and end it after `patience` seconds."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        if self.wait(patience) is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
