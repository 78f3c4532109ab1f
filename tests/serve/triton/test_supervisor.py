"""What the supervisor promises when things die, hang or are told to stop, with a real server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

import penjing.model_repository
from penjing.core.errors import (
    ConfigError,
    InputError,
    PenjingError,
    RequestError,
    ServerError,
    SetupError,
    UnavailableError,
)
from penjing.core.progress import Silent
from penjing.serve.client.client import Client
from penjing.serve.client.protocol import PULSE_VARIABLE
from penjing.serve.supervisor import state, supervisor
from penjing.serve.supervisor.process import ServeConfig, check_ports
from penjing.serve.supervisor.vigil import Vigil
from penjing.serve.triton.pulse import Phase, Pulse, announce
from tests.serve.triton.serving import Served, alive, free_ports, leftovers, serving, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def server_ready(served: Served) -> bool:
    """Triton server's own health by gRPC."""
    with grpc.insecure_channel(served.address) as channel:
        messages: Any = service_pb2  # its classes are made when it is imported: type checkers see none
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return stub.ServerReady(messages.ServerReadyRequest()).ready
        except grpc.RpcError:
            return False


class Asking:
    """Streams that run in threads; what each got, and when it ended."""

    def __init__(self, served: Served, count: int, max_tokens: int) -> None:
        self.texts: list[str | None] = [None] * count
        self.errors: list[Exception | None] = [None] * count
        self.started = threading.Barrier(count + 1)
        self._client = served.client()
        self._threads = [threading.Thread(target=self._ask, args=(i, max_tokens)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        self.started.wait(30)

    def _ask(self, index: int, max_tokens: int) -> None:
        stream = self._client.stream("a tree " * (index + 1), max_tokens=max_tokens, **GREEDY)
        next(stream)
        self.started.wait(30)
        try:
            for _ in stream:
                pass
            result = stream.result
            assert result.finish_reason == "length"
            assert result.num_output_tokens == max_tokens
            self.texts[index] = result.text
        except (PenjingError, AssertionError) as error:
            self.errors[index] = error

    def join(self, seconds: float) -> None:
        """Fails if a stream has not ended after `seconds`."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a request hangs"
        self._client.close()


def test_a_killed_stub_is_noticed_at_once_and_the_server_comes_back(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        with served.client() as client:
            before = client.generate("the same", max_tokens=12, **GREEDY).text
        asking = Asking(served, 4, max_tokens=4000)
        os.kill(served.stub_pid, signal.SIGKILL)
        wait_until(lambda: served.health() != 200, 1.0, "not ready after SIGKILL")
        asking.join(5)
        assert all(isinstance(error, ServerError) and "broke after" in str(error) for error in asking.errors)
        assert served.wait_ready(restarts=1) < 30
        wait_until(lambda: served.health() == 200, 10, "ready after a restart")
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
    with serving(tiny_long, hang_timeout=5.0) as served:
        asking = Asking(served, 3, max_tokens=2000)
        os.kill(served.stub_pid, signal.SIGSTOP)
        wait_until(lambda: served.health() == 0, 1.0, "silence after SIGSTOP")
        with served.client() as client:
            assert not client.is_ready()
        os.kill(served.stub_pid, signal.SIGCONT)
        wait_until(lambda: served.health() == 200, 5, "ready after SIGCONT")
        asking.join(60)
        assert asking.errors == [None] * 3
        found = served.state
        assert found is not None
        assert found.restarts == 0
        # and a long one ends in a restart
        asking = Asking(served, 2, max_tokens=4000)
        stub = served.stub_pid
        os.kill(stub, signal.SIGSTOP)
        asking.join(20)
        assert all(isinstance(error, ServerError) for error in asking.errors)
        assert served.wait_ready(restarts=1) < 30
        assert not alive(stub)
        with served.client() as client:
            assert client.generate("a", max_tokens=2, **GREEDY).num_output_tokens == 2


def test_a_stopped_server_is_started_again_unless_it_goes_on(tiny_long: Path) -> None:
    """The model's process lives and beats all the while."""
    with serving(tiny_long, hang_timeout=2.0) as served:
        found = served.state
        assert found is not None
        os.kill(found.server_pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(found.server_pid, signal.SIGCONT)
        with served.client() as client:
            assert client.generate("a", max_tokens=2, **GREEDY).num_output_tokens == 2
        assert served.state == found
        os.kill(found.server_pid, signal.SIGSTOP)
        assert served.wait_ready(restarts=1) < 30
        with served.client(retries=10) as client:
            assert client.generate("a", max_tokens=2, **GREEDY).num_output_tokens == 2
        assert "has been stopped for 2." in state.log_path(served.config.grpc_port).read_text()


def test_sigterm_finishes_running_answers_and_refuses_new_ones(tiny_long: Path) -> None:
    with serving(tiny_long, {"num_blocks": 1024}) as served:  # for three whole contexts
        with served.client() as client:
            for stream in [client.stream("left at once", max_tokens=4000, **GREEDY) for _ in range(8)]:
                stream.close()
        alone = Asking(served, 3, max_tokens=4000)
        alone.join(120)
        asking = Asking(served, 3, max_tokens=4000)
        with served.client() as client:
            assert client.is_ready()
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: served.state is not None and served.state.state == "draining", 10, "draining")
            wait_until(lambda: served.health() != 200, 1, "bad health while it drains")
            wait_until(lambda: not server_ready(served), 1, "bad health by gRPC too")
            assert not client.is_ready()
            with pytest.raises(UnavailableError):
                client.generate("late", max_tokens=1)
            assert served.health() != 200
            assert asking.texts == [None] * 3  # they still run
        asking.join(120)
        assert asking.errors == [None] * 3
        assert asking.texts == alone.texts
        assert served.process.wait(20) == 0
        log = state.log_path(served.config.grpc_port).read_text()
        assert "successfully unloaded 'llm'" in log
        assert "Exit timeout expired" not in log  # nothing of a cancelled request kept the model
        assert leftovers(served.config.grpc_port) == []


def test_requests_that_were_left_or_refused_do_not_keep_the_server_from_ending(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        with served.client() as client:
            for stream in [client.stream("left at once", max_tokens=4000, **GREEDY) for _ in range(8)]:
                stream.close()
            for _ in range(50):
                with pytest.raises(RequestError):
                    client.generate("refused", temperature=-1)
                with client.stream("left at its end", max_tokens=2, **GREEDY) as stream:
                    while next(stream).finish_reason is None:
                        pass
            assert client.generate("answered", max_tokens=2, **GREEDY).num_output_tokens == 2
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        log = state.log_path(served.config.grpc_port).read_text()
        assert "successfully unloaded 'llm'" in log
        assert "Exit timeout expired" not in log
        assert leftovers(served.config.grpc_port) == []


def test_a_second_signal_ends_at_once(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        asking = Asking(served, 2, max_tokens=4000)
        served.process.send_signal(signal.SIGINT)
        wait_until(lambda: served.state is not None and served.state.state == "draining", 10, "draining")
        served.process.send_signal(signal.SIGINT)
        asking.join(10)
        assert all(isinstance(error, UnavailableError) and "shuts down" in str(error) for error in asking.errors)
        assert served.process.wait(20) == 0, served.errors()


def test_a_killed_supervisor_takes_its_server_along(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        found = served.state
        assert found is not None
        served.process.kill()
        served.process.wait()
        wait_until(lambda: not alive(found.server_pid) and not alive(found.stub_pid), 5, "the end of the server")
        assert state.read_state(served.config.grpc_port) is not None
        assert not state.is_running(served.config.grpc_port)
        with state.owning(served.config.grpc_port):
            assert leftovers(served.config.grpc_port) == []
        check_ports(served.config)


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


def test_detach_status_and_stop(tiny_long: Path) -> None:
    grpc_port, http_port, metrics_port = map(str, free_ports(3))
    command = [str(Path(sys.executable).parent / "penjing"), "serve", str(tiny_long), "--detach"]
    command += ["--grpc-port", grpc_port, "--http-port", http_port, "--metrics-port", metrics_port]
    started = subprocess.run([*command, "--set", "num_blocks=64"], capture_output=True, text=True, timeout=100)
    try:
        assert started.returncode == 0, started.stderr
        assert f"penjing stop --grpc-port {grpc_port}" in started.stderr
        with Client(f"localhost:{grpc_port}") as client:
            assert client.generate("a", max_tokens=3, **GREEDY).num_output_tokens == 3
        again = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert again.returncode == SetupError.exit_code
        assert "penjing stop" in again.stderr
        status = subprocess.run([command[0], "server", "status"], capture_output=True, text=True, timeout=60)
        assert grpc_port in status.stdout + status.stderr
    finally:
        stopped = subprocess.run(
            [command[0], "stop", "--grpc-port", grpc_port], capture_output=True, text=True, timeout=60
        )
    assert stopped.returncode == 0
    assert "has stopped" in stopped.stderr
    assert not state.is_running(int(grpc_port))
    assert leftovers(int(grpc_port)) == []


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


class Lost:
    """A server whose model's process shows no life; half a minute passes with every look at it."""

    process = SimpleNamespace(pid=0)

    def __init__(self, clock: list[float], lives: bool) -> None:
        self.clock, self.lives, self.killed = clock, lives, False
        phase = Phase.SERVING if lives else Phase.LOADING
        self.pulse = SimpleNamespace(stub_pid=int(lives), phase=phase, beat_age=lambda: 0.0 if lives else 1e9)

    def wait(self, seconds: float, wake_fd: int) -> None:
        self.clock[0] += 30.0

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("num_lost", [2, 3])
def test_a_model_process_that_never_lives_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, tiny_long: Path, num_lost: int
) -> None:
    clock, servers = [0.0], list[Lost]()

    def start(*_: Any) -> Lost:
        servers.append(Lost(clock, lives=len(servers) == num_lost))
        return servers[-1]

    def watch(self: Any, server: Any) -> str:
        self.stops = 1
        return "stopped"

    monkeypatch.setattr(supervisor.ServerProcess, "start", start)
    monkeypatch.setattr(supervisor._Supervisor, "_accepts_connections", lambda self: True)
    monkeypatch.setattr(supervisor._Supervisor, "_canary", lambda self: None)
    monkeypatch.setattr(supervisor._Supervisor, "_watch", watch)
    monkeypatch.setattr(supervisor._Supervisor, "_sleep", lambda self, seconds: None)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    port = free_ports(1)[0]
    with state.owning(port):
        found: Any = None  # what is installed does not matter: nothing is started
        starting = supervisor._Supervisor(found, tiny_long, ServeConfig(grpc_port=port), "{}", Silent())
        if num_lost == supervisor.MAX_LOST_STARTS:
            with pytest.raises(ServerError, match="did not start within 60 s"):
                starting.run()
        else:
            starting.run()
    assert len(servers) == 3
    assert all(server.killed for server in servers)


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


def test_the_server_is_silent_while_the_model_is() -> None:
    vigil = Vigil(ServeConfig(freeze_after=0.7, hang_timeout=5.0))

    def silent(now: float, beat_age: float, stopped: bool = False) -> bool:
        return vigil.should_be_silent(now, beat_age, stopped)

    assert [silent(t, 0.05) for t in (1, 2, 3)] == [False] * 3
    assert silent(4.0, 0.1, stopped=True)  # at once
    assert silent(6.0, 2.1, stopped=True)
    assert not silent(6.1, 2.2)  # continued: it may need the server to show life
    assert not silent(6.5, 2.6)
    assert silent(6.7, 2.8)  # it did not
    assert not silent(6.9, 3.0)  # a moment half way
    assert silent(7.5, 3.6)
    assert silent(8.5, 4.6)
    assert not silent(8.6, 0.0)
    assert silent(10.0, 0.8)


def test_wrong_settings_are_refused_before_anything_starts(tiny_long: Path, tmp_path: Path) -> None:
    grpc_port, http_port, metrics_port = free_ports(3)
    config = ServeConfig(grpc_port=grpc_port, http_port=http_port, metrics_port=metrics_port)
    with pytest.raises(InputError, match="nothing"):
        supervisor.serve(tmp_path / "nothing", config)
    with pytest.raises(ConfigError, match=r"max_num_sequence.*did you mean"):
        supervisor.serve(tiny_long, config, engine_overrides=["max_num_sequence=3"])
    with pytest.raises(ConfigError, match="--grpc-port and --http-port are both"):
        check_ports(ServeConfig(grpc_port=http_port, http_port=http_port, metrics_port=metrics_port))
    with pytest.raises(SetupError, match="--host 'nowhere'"):
        check_ports(ServeConfig(host="nowhere"))
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
