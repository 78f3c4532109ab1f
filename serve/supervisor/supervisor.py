"""`penjing serve`: keeps a Triton server with a living engine behind it, or none at all.

Triton server neither restarts a dead Python process nor says that it is gone: its health stays good. So the supervisor
watches that process and its pulse (pulse.py), and kills and restarts the server when either is bad: clients see a
broken connection and a closed port, both of which they know how to handle, and no request hangs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.core.config import parse_config
from penjing.core.errors import PenjingError, ServerError
from penjing.core.progress import Progress, Silent, progress_bar
from penjing.serve.families.base import family_at, read_overrides
from penjing.serve.families.repository import rename_entry
from penjing.serve.gate.config import FrontModel
from penjing.serve.site.process import check_front
from penjing.serve.supervisor import state
from penjing.serve.supervisor.detach import READY, detach_supervisor
from penjing.serve.supervisor.drain import Drain
from penjing.serve.supervisor.install import ServerInstall, install
from penjing.serve.supervisor.kept_front import KeptFront, adapters_stamp, front_model, named_adapters
from penjing.serve.supervisor.process import MODEL_PROCESS, ServeConfig, ServerProcess, check_ports
from penjing.serve.supervisor.signals import stop_signals
from penjing.serve.supervisor.vigil import EyesVigil, Vigil
from penjing.serve.triton.hang_clock import HangClock
from penjing.serve.triton.pulse import Phase

POLL_SECONDS = 0.05
FILES_SECONDS = 1.0
CANARY_SECONDS = 30.0  # for the first answer
STABLE_SECONDS = 60.0  # after which a crash is news and not a loop
MAX_BACKOFF_SECONDS = 30.0
GIVE_UP_SECONDS = 3.0
FIRST_BEAT_SECONDS = 60.0  # from the server's start to the model's process: 1 s, more where the disk is slow
LOADING_BEAT_SECONDS = 60.0  # without a sign of life while the model is loaded
MAX_LOST_STARTS = 3
NOT_READY = "not ready"


def serve(
    model: Path,
    config: ServeConfig | None = None,
    *,
    detach: bool = False,
    tied: bool = False,
    engine_overrides: list[str] | None = None,
) -> None:
    """Serve `model`; returns when the server was told to stop, or with `detach` when it is ready. A detached server
    that is `tied` also stops when the thread that called this ends, killed or not.

    Raises:
        InputError: `model` is not a checkpoint or artifact.
        ConfigError: a wrong engine setting, a device that is not there, two equal ports.
        SetupError: a port is in use, the machine cannot run Triton server or front, another supervisor has the port.
        ServerError: the model could not be loaded, or the server keeps dying; the message has the log's end.
    """
    config = config or ServeConfig()
    family = family_at(model)
    settings = read_overrides(family.settings, engine_overrides or [])
    engine_json = settings.model_dump_json(exclude_unset=True)
    model = family.check(model, settings)
    if state.is_running(config.grpc_port):
        with state.owning(config.grpc_port):  # raises, with the right words
            pass
    if config.front is not None:
        check_front(config.front)
    check_ports(config)
    with progress_bar() as progress:
        server = install(progress)
        if detach:
            detach_supervisor(model, config, engine_json, progress, tied=tied)
        else:
            with state.owning(config.grpc_port):
                _Supervisor(server, model, config, engine_json, progress).run()


class _NotStartedError(Exception):
    """There is no server, or its model's process shows no life and no error either, and Triton server itself would wait
    for it without an end."""

    tries = MAX_LOST_STARTS


class _EndedError(_NotStartedError):
    """A process ended before it said a word: Triton server ends those that are starved as they start. What ends each of
    them is told after the second."""

    tries = 2


class _Supervisor:
    """Runs servers one after the other until it is told to stop."""

    def __init__(
        self, install: ServerInstall, model: Path, config: ServeConfig, engine_json: str, progress: Progress
    ) -> None:
        self.install, self.model, self.config = install, model, config
        self.engine_json, self.progress = engine_json, progress
        self.family = family_at(model)
        self.settings = parse_config(self.family.settings, json.loads(engine_json), "--set")
        # Read once: a model goes on when its folder has been moved or deleted.
        self._facts = front_model(config, model, self.family, self.settings, aliases=(self.family.name,))
        self.front = KeptFront(config.front, (self._facts,), config.grpc_port)
        self._adapters: tuple[int, ...] = ()
        self.stops = 0  # signals received: one drains, two end at once
        self._saved, self._kept_files = True, 0.0
        self.state = state.ServerState(
            state="starting",
            model=str(model),
            host=config.host,
            grpc_port=config.grpc_port,
            http_port=config.http_port or 0,
            metrics_port=config.metrics_port,
            supervisor_pid=os.getpid(),
            log=str(state.log_path(config.grpc_port)),
            front_url="" if config.front is None else config.front.url,
            name=config.model_name or self.family.name,
            fleet_pid=config.fleet_pid,
        )

    def run(self) -> None:
        """Returns after a stop.

        Raises:
            ServerError: the first start fails.
            SetupError: the disk is full, or the machine has no room for another process.
        """
        os.umask(0o077)
        state.log_path(self.config.grpc_port).unlink(missing_ok=True)
        if not self.config.fleet_pid:
            state.forget_adapters(self.config.grpc_port)
            state.write_first_state(self.state)
        self.progress.start(f"loading {self.model.name}", 1)
        with stop_signals(self._stop) as self.wake_fd:
            try:
                self.front.start()
                self._run_servers()
            except PenjingError as error:
                self._note("failed", str(error))
                raise
            finally:
                self.front.end()
                if not self.config.fleet_pid:
                    state.forget_adapters(self.config.grpc_port)

    def _stop(self) -> None:
        self.stops += 1

    def _shown(self) -> FrontModel:
        return self._facts.model_copy(update={"adapters": named_adapters(self.config.grpc_port, self.settings)})

    def _keep_front(self) -> None:
        adapters = adapters_stamp(self.config.grpc_port)
        if adapters != self._adapters:
            self._adapters = adapters
            self.front.show((self._shown(),))
        if (line := self.front.keep(starting=self.state.state == "starting")) is not None:
            self._say(line)
            state.append_log(self.config.grpc_port, line)
        if self.front.pid != self.state.front_pid:
            self._note(self.state.state, self.state.message, front_pid=self.front.pid)

    def _run_servers(self) -> None:
        backoff, was_ready, lost_starts = 0.0, False, 0
        scratch = state.repository_path(self.config.grpc_port)
        repository = self.family.repository(self.model, self.settings, scratch)  # once: a disk may be full later
        if (name := self.config.model_name) is not None:
            repository = rename_entry(repository / self.family.name, scratch, name, self.config.model_version)
        while not self.stops:
            self._note("starting" if not was_ready else "restarting", self.state.message)
            ready_at = None
            try_again = was_ready
            try:
                with self._server(repository) as server:
                    failure = self._wait_ready(server)
                    if failure is None and self.stops:
                        return  # it was loading: nobody waits for an answer
                    if failure is None:
                        ready_at = time.monotonic()
                        self._announce(server, first=not was_ready)
                        was_ready = try_again = True
                        failure = self._watch(server)
                    if failure is None:
                        self._drain(server)
                        return
            except _NotStartedError as error:
                failure, lost_starts = str(error), lost_starts + 1
                try_again = was_ready or lost_starts < error.tries
            if not try_again:
                raise ServerError(f"{failure}; the end of {self.state.log}:\n{state.tail(Path(self.state.log))}")
            stable = ready_at is not None and time.monotonic() - ready_at > STABLE_SECONDS
            backoff = 0.0 if stable else backoff
            self._note("restarting", str(failure), restarts=self.state.restarts + 1, server_pid=0, stub_pid=0)
            line = f"{failure}; restarting" + (f" in {backoff:.0f} s" if backoff else "")
            self._say(line)
            state.append_log(self.config.grpc_port, line)
            self._sleep(backoff)
            backoff = min(max(1.0, 2 * backoff), MAX_BACKOFF_SECONDS)

    @contextmanager
    def _server(self, repository: Path) -> Iterator[ServerProcess]:
        try:
            server = ServerProcess.start(
                self.install, self.config, self.family, repository, self.model, self.engine_json
            )
        except OSError as error:  # a machine without room for processes or descriptors
            raise _NotStartedError(f"Triton server cannot be started: {error}") from error
        self._note(self.state.state, self.state.message, server_pid=server.process.pid)
        try:
            yield server
        finally:
            server.kill()

    def _wait_ready(self, server: ServerProcess) -> str | None:
        """None once the whole path from gRPC to the engine has given a token, or a stop was asked; else what failed."""
        started = time.monotonic()
        clock = HangClock(LOADING_BEAT_SECONDS, self.config.start_timeout)  # starved as it loads is not hung either
        while not self.stops:
            self._keep_front()
            ended = server.wait(POLL_SECONDS, self.wake_fd)
            has_failed = Phase.FAILED in (server.pulse.phase, server.eyes and server.eyes.phase)
            if ended is not None and not has_failed:
                raise _EndedError(ended)
            if has_failed:  # the reason is on its way to the log
                return ended or server.wait(GIVE_UP_SECONDS, self.wake_fd) or "the model could not be loaded"
            seconds = time.monotonic() - started
            if seconds > FIRST_BEAT_SECONDS and not server.pulse.stub_pid:
                raise _NotStartedError(f"the model's process did not start within {FIRST_BEAT_SECONDS:.0f} s")
            pid = server.pulse.stub_pid
            if pid and (failure := clock.verdict(pid, time.monotonic(), server.pulse.beat_age())) is not None:
                raise _NotStartedError(f"{MODEL_PROCESS} {failure} as it loaded")
            if seconds > self.config.start_timeout:
                return f"the model was not ready within {self.config.start_timeout:.0f} s"
            seeing = server.eyes is None or server.eyes.phase is Phase.SERVING
            if server.pulse.phase is Phase.SERVING and seeing and self._accepts_connections():
                return self._canary()
        return None

    def _watch(self, server: ServerProcess) -> str | None:
        """Watch a server that is ready; None when a stop was asked, else what is wrong with it."""
        config, pulse = self.config, server.pulse
        looked = time.monotonic()
        vigil = Vigil(config)
        clock = HangClock(config.hang_timeout, config.starve_timeout)
        eyes = None if server.eyes is None else EyesVigil(config, server.eyes)
        stopped_at: float | None = None
        while not self.stops:
            self._keep_front()
            self._keep_files()
            if (failure := server.wait(POLL_SECONDS, self.wake_fd)) is not None:
                return failure
            now = time.monotonic()
            stalled, looked = now - looked, now
            if pulse.phase is Phase.FAILED:
                return "the engine gave up (see the log)"
            if (failure := clock.verdict(pulse.stub_pid, now, pulse.beat_age())) is not None:
                return f"{MODEL_PROCESS} {failure}"
            if eyes is not None and (failure := eyes.failure(now)) is not None:
                return failure
            if stalled > config.freeze_after:  # this process was asleep too: a suspended machine, say
                continue
            if (age := pulse.loop_age()) > config.step_timeout:
                return f"a step of the engine has taken {age:.0f} s"
            stopped_at = (stopped_at or now) if server.is_stopped() else None
            if stopped_at is not None and now - stopped_at > config.hang_timeout:
                return f"the server has been stopped for {now - stopped_at:.1f} s"
            silent = vigil.should_be_silent(now, pulse.beat_age(), server.stub_is_stopped())
            self._note_readiness(server)
            if silent and not server.frozen:
                server.freeze()
                self._note(NOT_READY, "the model's process shows no sign of life")
            elif server.frozen and not silent:
                server.thaw()
                self._note(READY, "")
        return None

    def _note_readiness(self, server: ServerProcess) -> None:
        """The front asks for a token every two seconds; without one for ten the server is not ready, whatever beats."""
        if self.state.state == READY and not self.front.ready:
            self._note(NOT_READY, "no token has come back through the front")
        elif self.state.state == NOT_READY and self.front.ready and not server.frozen:
            self._note(READY, "")

    def _drain(self, server: ServerProcess) -> None:
        """Finish what runs, refuse what comes, end the server."""
        timeout = self._drain_seconds()
        self._note("draining", "")
        self.front.drain()
        server.thaw()
        drain = Drain(server, timeout, self.wake_fd, lambda: self.stops, self._say)
        if self.family.queued_by_server:
            drain.servers_queue()
        else:
            drain.own_queue()

    def _drain_seconds(self) -> float:
        try:
            return float(state.drain_path(self.config.grpc_port).read_text())
        except (FileNotFoundError, ValueError):
            return self.config.drain_timeout

    def _announce(self, server: ServerProcess, first: bool) -> None:
        self._note(READY, "", stub_pid=server.pulse.stub_pid)
        if first:
            self.progress.advance()
        self._say(f"{self.model.name} is ready: {self.config.endpoints}")

    def _accepts_connections(self) -> bool:
        """Whether every port is open: Triton server opens them one after the other."""
        try:
            for flag, port in self.config.ports().items():
                socket.create_connection((self.config.address_of(flag), port), timeout=1).close()
        except OSError:
            return False
        return self.front.answers()

    def _canary(self) -> str | None:
        """Ask the model as a client would; what failed, in words."""
        from penjing.serve.client.client import Client

        with Client(self.config.address(self.config.grpc_port), model=self.state.name, retries=0) as client:
            try:
                self.family.ask(client, CANARY_SECONDS)
            except PenjingError as error:
                return f"the server answers no request: {error}"
        return None

    def _note(self, name: str, message: str, **changes: Any) -> None:
        self.state = replace(self.state, state=name, message=message, **changes)
        self._saved = state.write_state(self.state)

    def _say(self, line: str) -> None:
        with suppress(OSError):  # a terminal that is gone, or a file on a full disk
            self.progress.note(line)

    def _keep_files(self) -> None:
        """Once a second: bound the log, and write a state that a full disk did not take."""
        if (now := time.monotonic()) < self._kept_files + FILES_SECONDS:
            return
        self._kept_files = now
        state.rotate_log(state.log_path(self.config.grpc_port))
        if not self._saved:
            self._saved = state.write_state(self.state)

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stops and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _main(arguments: list[str]) -> int:
    """The background supervisor: its first error goes to whoever detached it, and to the state file."""
    model, config_json, engine_json = arguments
    config = ServeConfig.model_validate(json.loads(config_json))
    try:
        with state.owning(config.grpc_port):
            _Supervisor(install(), Path(model), config, engine_json, Silent()).run()
    except PenjingError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
