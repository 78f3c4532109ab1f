"""What keeps a server from starting, and how it is told."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penjing.model_repository
from penjing.core.errors import (
    ConfigError,
    InputError,
    ServerError,
    SetupError,
)
from penjing.core.progress import PlainProgress, Silent
from penjing.serve.client.protocol import PULSE_VARIABLE
from penjing.serve.supervisor import state, supervisor
from penjing.serve.supervisor.process import ServeConfig, check_ports
from penjing.serve.triton.hang_clock import HangClock, ThreadState
from penjing.serve.triton.pulse import Phase, Pulse, announce
from tests.serve.triton.serving import Served, free_ports, leftovers

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]


class Lost:
    """A server whose model's process shows no life; half a minute passes with every look at it."""

    process = SimpleNamespace(pid=0)
    eyes = None

    def __init__(self, clock: list[float], lives: bool) -> None:
        self.clock, self.lives, self.killed = clock, lives, False
        phase = Phase.SERVING if lives else Phase.LOADING
        self.pulse = SimpleNamespace(stub_pid=int(lives), phase=phase, beat_age=lambda: 0.0 if lives else 1e9)

    def wait(self, seconds: float, wake_fd: int) -> str | None:
        self.clock[0] += 30.0
        return None

    def kill(self) -> None:
        self.killed = True


def test_a_model_that_does_not_load_says_why(tiny_long: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in tiny_long.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    served = Served(folder)
    assert served.process.wait(60) == ServerError.exit_code
    assert "model.safetensors" in served.errors()
    assert "Traceback" not in served.errors()
    assert leftovers(served.config.grpc_port) == []
    served.end()


class Ended(Lost):
    """A server one of whose processes ends as it starts; with a reason it has failed, and said so."""

    def __init__(self, clock: list[float], phase: Phase) -> None:
        super().__init__(clock, lives=False)
        self.pulse.phase = phase

    def wait(self, seconds: float, wake_fd: int) -> str:
        return "the model's process ended unexpectedly"


Starting = Callable[[Callable[[int], Lost]], tuple[list[Lost], ServerError | None]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tiny_long: Path) -> Starting:
    """Runs a supervisor that gets these servers, by their numbers, until one lives; those, and what it raised."""
    servers = list[Lost]()

    def watch(self: Any, server: Any) -> str:
        self.stops = 1
        return "stopped"

    def run(server: Callable[[int], Lost]) -> tuple[list[Lost], ServerError | None]:
        def start(*_: Any) -> Lost:
            servers.append(server(len(servers)))
            return servers[-1]

        monkeypatch.setattr(supervisor.ServerProcess, "start", start)
        port = free_ports(1)[0]
        with state.owning(port):
            found: Any = None  # what is installed does not matter: nothing is started
            starting = supervisor._Supervisor(found, tiny_long, ServeConfig(grpc_port=port), "{}", PlainProgress())
            try:
                starting.run()
            except ServerError as error:
                return servers, error
        return servers, None

    monkeypatch.setattr(supervisor._Supervisor, "_accepts_connections", lambda self: True)
    monkeypatch.setattr(supervisor._Supervisor, "_canary", lambda self: None)
    monkeypatch.setattr(supervisor._Supervisor, "_watch", watch)
    monkeypatch.setattr(supervisor._Supervisor, "_sleep", lambda self, seconds: None)
    return run


@pytest.mark.parametrize("num_lost", [2, 3])
def test_a_model_process_that_never_lives_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, started: Starting, num_lost: int
) -> None:
    clock = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    servers, error = started(lambda number: Lost(clock, lives=number == num_lost))
    if num_lost == supervisor.MAX_LOST_STARTS:
        assert "did not start within 60 s" in str(error)
    else:
        assert error is None
    assert len(servers) == 3
    assert all(server.killed for server in servers)


@pytest.mark.parametrize(
    ("num_ended", "phase", "num_started"), [(1, Phase.LOADING, 2), (2, Phase.LOADING, 2), (1, Phase.FAILED, 1)]
)
def test_a_first_start_that_ends_without_a_word_is_tried_once_more(
    started: Starting, capsys: pytest.CaptureFixture[str], num_ended: int, phase: Phase, num_started: int
) -> None:
    clock = [0.0]
    servers, error = started(lambda number: Ended(clock, phase) if number < num_ended else Lost(clock, lives=True))
    assert len(servers) == num_started
    assert all(server.killed for server in servers)
    ended = "the model's process ended unexpectedly"
    assert (error is None) if num_ended < num_started else str(error).startswith(ended)
    assert (f"{ended}; restarting" in capsys.readouterr().err) == (num_started == 2)


@pytest.mark.parametrize("runnable", [True, False])
def test_a_model_that_gets_no_processor_as_it_loads_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tiny_long: Path, runnable: bool
) -> None:
    clock = [0.0]

    class Loading(Lost):
        """It has beaten once, long ago; ninety seconds later it serves."""

        def __init__(self, *_: Any) -> None:
            super().__init__(clock, lives=False)
            self.pulse.stub_pid, self.pulse.beat_age = 1, lambda: clock[0] + 1.0

        def wait(self, seconds: float, wake_fd: int) -> str | None:
            clock[0] += 0.4
            if clock[0] > 90.0:
                self.pulse.phase = Phase.SERVING
            return None

    monkeypatch.setattr(supervisor._Supervisor, "_accepts_connections", lambda self: True)
    monkeypatch.setattr(supervisor._Supervisor, "_canary", lambda self: None)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    states = {1: ThreadState(runnable, 0.0)}
    monkeypatch.setattr(supervisor, "HangClock", lambda *times: HangClock(*times, look=lambda _: states))
    port = free_ports(1)[0]
    with state.owning(port):
        found: Any = None
        starting = supervisor._Supervisor(found, tiny_long, ServeConfig(grpc_port=port), "{}", Silent())
        starting.wake_fd = -1
        server: Any = Loading()
        if runnable:
            assert starting._wait_ready(server) is None
        else:
            with pytest.raises(supervisor._NotStartedError, match=r"has hung for 60.* s as it loaded"):
                starting._wait_ready(server)


def test_a_model_shows_life_before_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse()
    assert not pulse.stub_pid
    announce()  # without a supervisor: nothing to tell
    monkeypatch.setenv(PULSE_VARIABLE, str(pulse.path))
    announce()
    assert (pulse.stub_pid, pulse.phase) == (os.getpid(), Phase.LOADING)
    assert pulse.beat_age() < 60
    text = (Path(penjing.model_repository.__path__[0]) / "llm" / "1" / "model.py").read_text()
    assert text.index("announce()") < text.index("import triton_python_backend_utils") < text.index("LLMAdapter")


def test_a_server_takes_connections_when_all_its_ports_are_open(tiny_long: Path) -> None:
    grpc_port, http_port, metrics_port = free_ports(3)
    config = ServeConfig(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    found: Any = None  # what is installed does not matter: nothing is started
    starting = supervisor._Supervisor(found, tiny_long, config, "{}", Silent())
    accepts = []
    with ExitStack() as listening:
        for port in config.ports().values():
            listening.enter_context(socket.create_server(("127.0.0.1", port)))
            accepts.append(starting._accepts_connections())
    assert accepts == [False, False, True]


def test_wrong_settings_are_refused_before_anything_starts(tiny_long: Path, tmp_path: Path) -> None:
    grpc_port, http_port, metrics_port = free_ports(3)
    config = ServeConfig(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    with pytest.raises(InputError, match="nothing"):
        supervisor.serve(tmp_path / "nothing", config)
    with pytest.raises(ConfigError, match=r"max_num_sequence.*did you mean"):
        supervisor.serve(tiny_long, config, engine_overrides=["max_num_sequence=3"])
    with pytest.raises(ConfigError, match="--grpc-port and --http-port are both"):
        check_ports(ServeConfig(grpc_port=http_port, http_port=http_port, metrics_port=metrics_port))
    for host in ("nowhere", "192.0.2.1"):  # a name that is none, and an address for documents alone
        with pytest.raises(SetupError, match=f"--host '{host}' is not an address of this machine"):
            check_ports(ServeConfig(host=host))
    assert state.read_state(grpc_port) is None


@pytest.mark.parametrize("flag", ["grpc", "http", "metrics"])
def test_a_port_in_use_is_named_with_its_flag(tiny_long: Path, flag: str) -> None:
    grpc_port, http_port, metrics_port = free_ports(3)
    ports = {"grpc": grpc_port, "http": http_port, "metrics": metrics_port}
    config = ServeConfig(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[flag]))
        taken.listen()
        with pytest.raises(SetupError, match=f"port {ports[flag]} .--{flag}-port.*in use"):
            supervisor.serve(tiny_long, config)
