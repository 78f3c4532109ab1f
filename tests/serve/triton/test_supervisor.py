"""What the supervisor promises when things die or hang, with a real server."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penjing.core.errors import (
    ServerError,
)
from penjing.core.progress import Silent
from penjing.serve.supervisor import state, supervisor
from penjing.serve.supervisor.process import ServeConfig, check_ports
from tests.serve.triton.asking import GREEDY, Asking
from tests.serve.triton.serving import alive, free_ports, leftovers, serving, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]


def test_a_killed_stub_is_noticed_at_once_and_the_server_comes_back(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        with served.client() as client:
            before = client.generate("the same", max_tokens=12, **GREEDY).text
        asking = Asking(served, 4, max_tokens=4000)
        os.kill(served.stub_pid, signal.SIGKILL)
        wait_until(lambda: served.health() != 200, 60, "not ready after SIGKILL")
        asking.join(60)
        assert all(isinstance(error, ServerError) and "broke after" in str(error) for error in asking.errors)
        served.wait_ready(restarts=1)
        wait_until(lambda: served.health() == 200, 60, "ready after a restart")
        with served.client() as client:
            assert client.generate("the same", max_tokens=12, **GREEDY).text == before
        found = served.state
        assert found is not None
        assert found.restarts == 1
        os.kill(found.server_pid, signal.SIGKILL)  # the server itself may die too
        with served.client(retries=20) as client:
            assert client.generate("the same", max_tokens=12, **GREEDY).text == before  # found no server at first
    assert leftovers(served.config.grpc_port) == []


def test_a_stopped_stub_is_not_ready_and_a_short_stop_costs_nothing(tiny_long: Path) -> None:
    with serving(tiny_long, hang_timeout=10.0) as served:  # the test itself may be kept waiting
        asking = Asking(served, 3, max_tokens=2000)
        os.kill(served.stub_pid, signal.SIGSTOP)
        wait_until(lambda: served.health() == 0, 60, "silence after SIGSTOP")
        with served.client() as client:
            assert not client.is_ready()
        os.kill(served.stub_pid, signal.SIGCONT)
        wait_until(lambda: served.health() == 200, 60, "ready after SIGCONT")
        asking.join(60)
        assert asking.errors == [None] * 3
        found = served.state
        assert found is not None
        assert found.restarts == 0
        # and a long one ends in a restart
        asking = Asking(served, 2, max_tokens=4000)
        stub = served.stub_pid
        os.kill(stub, signal.SIGSTOP)
        asking.join(60)
        assert all(isinstance(error, ServerError) for error in asking.errors)
        served.wait_ready(restarts=1)
        assert not alive(stub)
        with served.client() as client:
            assert client.generate("a", max_tokens=2, **GREEDY).num_output_tokens == 2


def test_a_stopped_server_is_started_again_unless_it_goes_on(tiny_long: Path) -> None:
    """The model's process lives and beats all the while."""
    with serving(tiny_long, hang_timeout=6.0) as served:
        found = served.state
        assert found is not None
        os.kill(found.server_pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(found.server_pid, signal.SIGCONT)
        with served.client() as client:
            assert client.generate("a", max_tokens=2, **GREEDY).num_output_tokens == 2
        assert served.state == found
        os.kill(found.server_pid, signal.SIGSTOP)
        served.wait_ready(restarts=1)
        with served.client(retries=10) as client:
            assert client.generate("a", max_tokens=2, **GREEDY).num_output_tokens == 2
        assert re.search(r"has been stopped for \d+\.\d s", state.log_path(served.config.grpc_port).read_text())


def test_a_killed_supervisor_takes_its_server_along(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        found = served.state
        assert found is not None
        served.process.kill()
        served.process.wait()
        wait_until(lambda: not alive(found.server_pid) and not alive(found.stub_pid), 60, "the end of the server")
        assert state.read_state(served.config.grpc_port) is not None
        assert not state.is_running(served.config.grpc_port)
        with state.owning(served.config.grpc_port):
            assert leftovers(served.config.grpc_port) == []
        check_ports(served.config)


def test_a_crash_loop_is_slowed_down(monkeypatch: pytest.MonkeyPatch, tiny_long: Path) -> None:
    """A server that gets ready and dies again, nine times, then lives for long and dies."""
    pauses: list[float] = []
    clock = [0.0]

    class Dying:
        process = SimpleNamespace(pid=0)
        pulse = SimpleNamespace(stub_pid=0)

        def kill(self) -> None: ...

    def watch(self: Any, server: Any) -> str:
        clock[0] += 61.0 if len(pauses) == 9 else 1.0
        self.stops = int(len(pauses) > 10)
        return "died"

    monkeypatch.setattr(supervisor.ServerProcess, "start", lambda *_: Dying())
    monkeypatch.setattr(supervisor._Supervisor, "_wait_ready", lambda *_: None)
    monkeypatch.setattr(supervisor._Supervisor, "_watch", watch)
    monkeypatch.setattr(supervisor._Supervisor, "_sleep", lambda self, seconds: pauses.append(seconds))
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    port = free_ports(1)[0]
    with state.owning(port):
        config = ServeConfig(grpc_port=port)
        found: Any = None  # what is installed does not matter: nothing is started
        looping = supervisor._Supervisor(found, tiny_long, config, "{}", Silent())
        looping.run()
        assert pauses[:11] == [0, 1, 2, 4, 8, 16, 30, 30, 30, 0, 1]
        assert looping.state.restarts == len(pauses)


def test_a_machine_without_room_for_processes_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, tiny_long: Path, tmp_path: Path
) -> None:
    """A server that died while there was no room for another one took its supervisor, and so the model, with it."""
    begin, starts, descriptors = supervisor.ServerProcess.start, [0], list[int]()

    class Dying:
        process = SimpleNamespace(pid=0)
        pulse = SimpleNamespace(stub_pid=0)

        def kill(self) -> None: ...

    def refuse(*_: Any, **__: Any) -> None:
        descriptors.append(len(os.listdir("/proc/self/fd")))
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def start(*settings: Any) -> Any:
        starts[0] += 1
        return begin(*settings) if starts[0] in (2, 3, 4, 5) else Dying()

    def watch(self: Any, server: Any) -> str:
        self.stops = int(starts[0] == 6)
        return "died"

    monkeypatch.setattr(supervisor.ServerProcess, "start", start)
    monkeypatch.setattr(supervisor._Supervisor, "_wait_ready", lambda *_: None)
    monkeypatch.setattr(supervisor._Supervisor, "_watch", watch)
    monkeypatch.setattr(supervisor._Supervisor, "_sleep", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    port = free_ports(1)[0]
    with state.owning(port):
        found: Any = SimpleNamespace(binary=tmp_path / "server", backends=tmp_path, numpy_folder=None, environment=dict)
        looping = supervisor._Supervisor(found, tiny_long, ServeConfig(grpc_port=port), "{}", Silent())
        looping.run()
        assert starts == [6]
        assert "Triton server cannot be started: [Errno 11] Resource temporarily" in state.log_path(port).read_text()
    assert len(descriptors) == 4
    assert len(set(descriptors)) == 1  # none is lost with a try
