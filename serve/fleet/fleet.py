"""Several models of one command: a supervisor and a Triton server each, and one front before all of them.

Triton server can hold several models in one process. But the supervisor's ways with a model that is dead or hangs are
to silence the server and to end it (supervisor.py), because a stream whose model's process is gone gets no end from
Triton server; in one process that would end the others' answers too. So each model has a server of its own.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from penjing.core.errors import PenjingError, ServerError, SetupError
from penjing.core.progress import Progress, Silent
from penjing.serve.fleet.again import command_again
from penjing.serve.fleet.change import forget_changes
from penjing.serve.fleet.changer import Changer
from penjing.serve.fleet.member import Member
from penjing.serve.fleet.plan import FleetPlan
from penjing.serve.fleet.state import FleetState, fleet_path, write_first_fleet, write_fleet
from penjing.serve.gate.config import FrontModel
from penjing.serve.supervisor.detach import READY
from penjing.serve.supervisor.kept_front import KeptFront, adapters_stamp
from penjing.serve.supervisor.state import ServerState, append_log, owning, write_state

POLL_SECONDS = 0.05
NOTE_SECONDS = 0.5  # between two looks at the models' states
END_SECONDS = 30.0  # from the second request to end: a server that is still there is killed
NOT_READY, STARTING, GONE = "not ready", "starting", "taken away"


class Fleet:
    """Keeps a member for each model, and the front, until it is told to stop."""

    def __init__(self, plan: FleetPlan, progress: Progress) -> None:
        self.plan, self.progress = plan, progress
        self.members = [Member(model) for model in plan.models]
        self.port = plan.port  # by which the whole is known, also when its first model has been taken away
        self.front = KeptFront(plan.front, self._shown, plan.port)
        self.changer = Changer(self.members, plan.port, self._show, lambda: self.front.has_heard)
        self._held = ExitStack()
        self.stops = 0  # signals received: one drains, two end at once
        self._noted = 0.0
        self._keeps_port = False
        self._adapters: list[tuple[int, ...]] = []
        self.state = FleetState(
            STARTING, plan.port, os.getpid(), front_url="" if plan.front is None else plan.front.url
        )

    def run(self) -> None:
        """Returns after a stop.

        Raises:
            ServerError: a model cannot be loaded.
            SetupError: the disk is full, or the machine has no room for another process.
        """
        os.umask(0o077)
        forget_changes(self.port)
        write_first_fleet(self.state)
        self.progress.start(f"loading {self.plan.names}", len(self.members))
        with self._signals():
            try:
                self._note(STARTING)
                self.front.start()
                for member in self.members:
                    member.start()
                self._wait_ready()
                self._watch()
                self._drain()
            except PenjingError as error:
                self._note("failed", str(error))
                raise
            finally:
                for member in self._all:
                    member.kill()
                self.front.end()
                self._held.close()
                forget_changes(self.port)
                fleet_path(self.port).unlink(missing_ok=True)

    @property
    def _all(self) -> list[Member]:
        return [*self.members, *self.changer.between]

    @property
    def _shown(self) -> tuple[FrontModel, ...]:
        return tuple(member.shown for member in self.members)

    def _show(self) -> None:
        """Tell the front of the models, and whoever asks how it stands."""
        models = tuple(member.model for member in self.members)
        self.plan = self.plan.model_copy(update={"models": models})
        self.front.show(self._shown)
        self._noted = 0.0

    def _keep_port(self) -> None:
        """Nobody else shall be known by the first model's port once that model has gone."""
        if not self._keeps_port and all(member.port != self.port for member in self._all):
            with suppress(SetupError):
                self._held.enter_context(owning(self.port))
                self._keeps_port = True
                pid = os.getpid()
                host = self.members[0].model.config.host
                write_state(ServerState(GONE, "", host, self.port, 0, 0, pid, fleet_pid=pid))  # for `penjing stop`

    def _wait_ready(self) -> None:
        loaded: set[str] = set()
        while not self.stops:
            self._keep_front(starting=True)
            for member in self.members:
                if (failure := member.failure()) is not None:
                    raise ServerError(f"{member.model.id}: {failure}")
                if member.model.id not in loaded and member.ready:
                    loaded.add(member.model.id)
                    self.progress.advance()
            if len(loaded) == len(self.members) and self.front.answers():
                self._note(READY)
                self._say(f"{self.plan.names}: ready. {self.plan.endpoints}")
                return
            self._note_now_and_then(STARTING)
            time.sleep(POLL_SECONDS)

    def _watch(self) -> None:
        while not self.stops:
            self._keep_front(starting=False)
            for member in self.members:
                if (line := member.keep()) is not None:
                    self._say(f"{member.model.id}: {line}")
                    append_log(member.port, line)
            if (line := self.changer.step()) is not None:
                self._say(line)
                append_log(self.port, line)
                self._keep_port()
            adapters = [adapters_stamp(member.port) for member in self.members]
            if adapters != self._adapters:
                self._adapters = adapters
                self._show()
            waiting = [member.model.id for member in self.members if not member.ready]
            if waiting:
                self._note_now_and_then(NOT_READY, f"{', '.join(waiting)} cannot answer now")
            elif not self.front.ready:
                self._note_now_and_then(NOT_READY, "no answer has come back through the front")
            else:
                self._note_now_and_then(READY)
            time.sleep(POLL_SECONDS)

    def _drain(self) -> None:
        """Finish what runs, refuse what comes, end every server."""
        self._note("draining")
        self.front.drain()
        asked, deadline = 0, math.inf  # each supervisor knows how long its running answers have
        while not all(member.ended for member in self._all) and time.monotonic() < deadline:
            if asked < min(self.stops, 2):
                asked += 1
                for member in self._all:
                    member.ask_to_end()
                if asked == 2:
                    deadline = time.monotonic() + END_SECONDS
            time.sleep(POLL_SECONDS)

    def _keep_front(self, *, starting: bool) -> None:
        if (line := self.front.keep(starting=starting)) is not None:
            self._say(line)
            append_log(self.port, line)

    def _note_now_and_then(self, name: str, message: str = "") -> None:
        changed = (name, message, self.front.pid) != (self.state.state, self.state.message, self.state.front_pid)
        if changed or time.monotonic() > self._noted + NOTE_SECONDS:
            self._note(name, message)

    def _note(self, name: str, message: str = "") -> None:
        facts = {member.model.id: _facts(member) for member in self.members}
        command = command_again(self.plan)
        found = replace(
            self.state, state=name, message=message, front_pid=self.front.pid, command=command, models=facts
        )
        if found != self.state and write_fleet(found):
            self.state = found
        self._noted = time.monotonic()

    def _say(self, line: str) -> None:
        with suppress(OSError):  # a terminal that is gone, or a file on a full disk
            self.progress.note(line)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def count(*_: Any) -> None:
            self.stops += 1

        previous = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _facts(member: Member) -> dict[str, Any]:
    model = member.model
    facts: dict[str, Any] = {
        "grpc_port": member.port,
        "metrics_port": model.config.metrics_port,
        "folder": str(model.folder),
        "share": model.share,
        "restarts": member.all_restarts,
    }
    if model.kv_cache is not None:
        facts |= {"kv_cache_bytes": model.kv_cache.bytes, "kv_cache_tokens": model.kv_cache.tokens}
    return facts


def _main(arguments: list[str]) -> int:
    """In the background: its first error goes to whoever detached it."""
    plan = FleetPlan.model_validate_json(arguments[0])
    try:
        Fleet(plan, Silent()).run()
    except PenjingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
