"""One of several models: its supervisor as a process, kept alive beside the others'."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from penjing.core.files import writing
from penjing.serve.fleet.plan import FleetModel
from penjing.serve.supervisor import state

READY = "ready"
STABLE_SECONDS = 60.0
MAX_BACKOFF_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Member:
    """A model, its supervisor, and through that its Triton server. Nothing of them is another model's."""

    def __init__(self, model: FleetModel) -> None:
        self.model = model
        self.port = model.config.grpc_port
        self.restarts = 0
        self._backoff = self._restart_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        state.forget_adapters(self.port)

    def start(self) -> None:
        """Start its supervisor, which dies with this process.

        Raises:
            SetupError: the disk is full.
        """
        errors = state.errors_path(self.port)
        config = self.model.config.model_copy(update={"fleet_pid": os.getpid()})
        command = [sys.executable, "-m", "penjing.serve.supervisor.supervisor", str(self.model.folder)]
        fleet = os.getpid()

        def die_with_fleet() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != fleet:
                os._exit(1)

        with writing(errors):
            errors.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stderr:
                self._process = subprocess.Popen(
                    [*command, config.model_dump_json(), self.model.engine_json],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    start_new_session=True,
                    preexec_fn=die_with_fleet,
                )
        self._started = time.monotonic()

    @property
    def found(self) -> state.ServerState | None:
        """What its supervisor last wrote; None while there is none."""
        found = state.read_state(self.port)
        if found is None or self._process is None or found.supervisor_pid != self._process.pid:
            return None
        return found

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        found = self.found
        return found is not None and found.state == READY

    @property
    def all_restarts(self) -> int:
        """Of its supervisor, and of its server by that."""
        found = self.found
        return self.restarts + (0 if found is None else found.restarts)

    def failure(self) -> str | None:
        """What its supervisor said as it ended; None while it runs."""
        if self._process is None or self._process.poll() is None:
            return None
        with suppress(OSError):
            said = state.errors_path(self.port).read_text(encoding="utf-8", errors="replace").strip()
            lines = said.rpartition("error: ")[2]
            if lines:
                return lines
        return f"its supervisor ended unexpectedly (exit code {self._process.returncode})"

    def keep(self) -> str | None:
        """Start its supervisor again when that has ended; says so, once."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._restart_at:
                self.start()
            return None
        if (failure := self.failure()) is None:
            return None
        self._process = None
        self._backoff = 0.0 if now - self._started > STABLE_SECONDS else self._backoff
        self._restart_at = now + self._backoff
        self._backoff = min(max(1.0, 2 * self._backoff), MAX_BACKOFF_SECONDS)
        self.restarts += 1
        return f"{failure}; restarting"

    def ask_to_end(self) -> None:
        """It drains; asked again, it ends at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs."""
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        """End what is left, and clean up behind it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            state.clean_up(self.port)
            state.forget_adapters(self.port)
