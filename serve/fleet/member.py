"""One of several models: its supervisor as a process, kept alive beside the others'."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress

from penjing.core.config import parse_config
from penjing.core.errors import PenjingError
from penjing.serve.families.base import family_at
from penjing.serve.fleet.plan import FleetModel
from penjing.serve.gate.config import FrontModel
from penjing.serve.supervisor import state
from penjing.serve.supervisor.detach import READY, start_apart, supervisor_command
from penjing.serve.supervisor.kept_front import front_model, named_adapters

STABLE_SECONDS = 60.0
MAX_BACKOFF_SECONDS = 30.0


class Member:
    """A model, its supervisor, and through that its Triton server. Nothing of them is another model's.

    Raises:
        InputError, ConfigError: the folder, or its settings, are of no model that can be served.
    """

    def __init__(self, model: FleetModel) -> None:
        self.model = model
        family = family_at(model.folder)
        self._settings = parse_config(family.settings, json.loads(model.engine_json), f"settings of {model.id}")
        self._shown = front_model(model.config, model.folder, family, self._settings)
        self.port = model.config.grpc_port
        self.restarts = 0
        self._backoff = self._restart_at = self._started = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        state.forget_adapters(self.port)

    def start(self) -> None:
        """Start its supervisor, which dies with this process.

        Raises:
            SetupError: the disk is full, or the machine has no room for another process.
        """
        config = self.model.config.model_copy(update={"fleet_pid": os.getpid()})
        command = supervisor_command(self.model.folder, config, self.model.engine_json)
        self._process = start_apart(command, state.errors_path(self.port), signal.SIGKILL)
        self._started = time.monotonic()

    @property
    def shown(self) -> FrontModel:
        """What the front must know of it. Of its folder that is what was there at first: a model goes on when its
        folder has been moved or deleted."""
        model = self.model
        names = {"id": model.id, "group": model.group, "version": model.version, "share": model.share}
        return self._shown.model_copy(update=names | {"adapters": named_adapters(self.port, self._settings)})

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
        """Start its supervisor again when that has ended; says so, once a try."""
        now = time.monotonic()
        if self._process is not None:
            failure = self.failure()
        else:
            failure = self._started_again() if now >= self._restart_at else None
        if failure is None:
            return None
        self._process = None
        self._backoff = 0.0 if now - self._started > STABLE_SECONDS else self._backoff
        self._restart_at = now + self._backoff
        self._backoff = min(max(1.0, 2 * self._backoff), MAX_BACKOFF_SECONDS)
        self.restarts += 1
        return f"{failure}; restarting"

    def _started_again(self) -> str | None:
        """Why it could not be started, which must not end the others: a full disk, or a machine without room for
        processes."""
        try:
            self.start()
        except (PenjingError, OSError) as error:
            return f"its supervisor cannot be started: {error}"
        return None

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
