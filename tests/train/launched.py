"""`penjing train RECIPE` in processes of its own, alone or as torchrun starts several."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from tests.forking import Forked


class Launched:
    """The processes of a run, and what they say.

    Args:
        processes: how many learn together; 0: one, which is told of no others.
    """

    def __init__(self, recipe: Path, *flags: str, processes: int = 0) -> None:
        self._said = recipe.parent / "said.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        with open(self._said, "wb") as out:
            self.processes = [
                Forked(
                    ["python", "-m", "penjing.train", recipe, *flags], stdout=out, stderr=out,
                    env=environment | (shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes else {})
                    | ({"LOCAL_WORLD_SIZE": str(processes)} if processes else {}),
                )
                for rank in range(max(processes, 1))
            ]  # fmt: skip

    @property
    def said(self) -> str:
        """By all of them."""
        return self._said.read_text()

    def finish(self, timeout: float) -> int:
        """The exit code of the first that failed, else 0; all are killed once they have taken `timeout` seconds."""
        deadline = time.monotonic() + timeout
        try:
            codes = [process.wait(max(deadline - time.monotonic(), 0.0)) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return next((code for code in codes if code), 0)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to all."""
        for process in self.processes:
            process.send_signal(number)

    def wait_for_step(self, run: Path, step: int) -> None:
        """Until the records of `run` reach beyond `step`."""
        deadline = time.monotonic() + 90
        path = run / "metrics.jsonl"
        while time.monotonic() < deadline:
            assert all(process.poll() is None for process in self.processes), self.said
            if path.exists() and len(path.read_text().splitlines()) > step:
                return
            time.sleep(0.02)
        self.stop(signal.SIGKILL)
        raise AssertionError("the run did not begin in 90 s: " + self.said)
