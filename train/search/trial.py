"""One trial up to one rung: `penjing train` in a process of its own, whose end cannot end the search."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from penjing.core.cluster.start import room_for_process
from penjing.core.cluster.tied import end_with
from penjing.core.errors import SetupError
from penjing.core.files import writing

GRACE_SECONDS = 60.0
"""For a trial that shall stop to save its state."""


@dataclass(frozen=True)
class Outcome:
    """The evaluation of a trial, or why there is none."""

    values: dict[str, float]
    reason: str = ""


class Runs(Protocol):
    """Where trials run. May be used from several threads."""

    def run(self, recipe: Path, overrides: list[str], until: int, folder: Path) -> Outcome | None:
        """Bring the trial of a `folder` from where it is to step `until`; None when it was stopped on the way.

        Raises:
            SetupError: a file cannot be written, or there is no place to run.
        """
        ...

    def stop(self) -> None:
        """Let all trials save their state and end; none is begun any more."""
        ...


class Trials:
    """Runs jobs in processes, from several threads; `stop` ends them all, and what they have is kept."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def run(self, recipe: Path, overrides: list[str], until: int, folder: Path) -> Outcome | None:
        """Bring the trial of a `folder` from where it is to step `until`; None when it was stopped on the way.

        What it says goes to log.txt in that folder. A process that an ended search left there may still save its
        state: it is waited for.

        Raises:
            SetupError: a file cannot be written, another process goes on working on the trial, or the machine has no
                room for one more.
        """
        result, log = folder / "evaluation.json", folder / "log.txt"
        changes = [part for override in overrides for part in ("--set", override)]
        goes = ["--resume", "auto", "--until", str(until), "--json", str(result)]
        with writing(log):
            folder.mkdir(parents=True, exist_ok=True)
            result.unlink(missing_ok=True)
            start = log.stat().st_size if log.exists() else 0
            out = open(log, "ab")  # noqa: SIM115 closed below
        with out, _alone(folder) as lock:
            with self._lock:
                if self.stopped:
                    return None
                with room_for_process():
                    process = subprocess.Popen(
                        [sys.executable, "-m", "penjing.train", str(recipe), *changes, *goes],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        env=os.environ | {"OMP_NUM_THREADS": str(self._threads)},
                        start_new_session=True,  # Ctrl-C reaches it through `stop`
                        pass_fds=(lock,),  # held until it ends, whatever becomes of this process
                        preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),  # and so saves its state
                    )
                self._running.add(process)
            process.wait()
            with self._lock:
                self._running.discard(process)
        if self.stopped:
            return None
        if process.returncode == 0 and result.exists():
            return Outcome(json.loads(result.read_text()))
        return Outcome({}, _reason(log, start, process.returncode))

    def stop(self) -> None:
        """Let all trials save their state and end; none is begun any more."""
        with self._lock:
            self.stopped = True
            running = list(self._running)
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """A lock on the trial, which processes that inherit it hold too."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"another process works on the trial in {folder} and does not end; end it, and give the same "
                        "command again"
                    ) from None
                time.sleep(0.1)
        yield lock
    finally:
        os.close(lock)


def _reason(log: Path, start: int, code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else f"exit code {code}"
