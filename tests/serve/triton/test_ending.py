"""How a server ends that is told to, with a real one: answers that run, requests that come, what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penjing.core.errors import (
    RequestError,
    SetupError,
    UnavailableError,
)
from penjing.serve.client.client import Client
from penjing.serve.supervisor import state
from tests.serve.triton.asking import GREEDY, Asking, server_ready
from tests.serve.triton.serving import alive, free_ports, leftovers, serving, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]


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
            wait_until(lambda: served.state is not None and served.state.state == "draining", 60, "draining")
            wait_until(lambda: served.health() != 200, 60, "bad health while it drains")
            wait_until(lambda: not server_ready(served), 60, "bad health by gRPC too")
            assert not client.is_ready()
            with pytest.raises(UnavailableError):
                client.generate("late", max_tokens=1)
            assert served.health() != 200
            assert asking.texts == [None] * 3  # they still run
        asking.join(120)
        assert asking.errors == [None] * 3
        assert asking.texts == alone.texts
        assert served.process.wait(60) == 0
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
        assert served.process.wait(60) == 0
        log = state.log_path(served.config.grpc_port).read_text()
        assert "successfully unloaded 'llm'" in log
        assert "Exit timeout expired" not in log
        assert leftovers(served.config.grpc_port) == []


def test_a_second_signal_ends_at_once(tiny_long: Path) -> None:
    with serving(tiny_long) as served:
        asking = Asking(served, 2, max_tokens=4000)
        served.process.send_signal(signal.SIGINT)
        wait_until(lambda: served.state is not None and served.state.state == "draining", 60, "draining")
        served.process.send_signal(signal.SIGINT)
        asking.join(60)
        assert all(isinstance(error, UnavailableError) and "shuts down" in str(error) for error in asking.errors)
        assert served.process.wait(60) == 0, served.errors()


def test_detach_status_and_stop(tiny_long: Path) -> None:
    grpc_port, http_port, metrics_port = map(str, free_ports(3))
    command = [str(Path(sys.executable).parent / "penjing"), "serve", str(tiny_long), "--detach"]
    command += ["--grpc-port", grpc_port, "--http-port", http_port, "--metrics-port", metrics_port]
    started = subprocess.run([*command, "--set", "num_blocks=64"], capture_output=True, text=True, timeout=120)
    try:
        assert started.returncode == 0, started.stderr
        assert f"penjing stop --grpc-port {grpc_port}" in started.stderr
        with Client(f"localhost:{grpc_port}") as client:
            assert client.generate("a", max_tokens=3, **GREEDY).num_output_tokens == 3
        again = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert again.returncode == SetupError.exit_code
        assert "penjing stop" in again.stderr
        status = subprocess.run([command[0], "server", "status"], capture_output=True, text=True, timeout=120)
        assert grpc_port in status.stdout + status.stderr
    finally:
        stopped = subprocess.run(
            [command[0], "stop", "--grpc-port", grpc_port], capture_output=True, text=True, timeout=60
        )
    assert stopped.returncode == 0
    assert "has stopped" in stopped.stderr
    assert not state.is_running(int(grpc_port))
    assert leftovers(int(grpc_port)) == []


def test_a_temporary_server_ends_with_whoever_started_it(tiny_long: Path) -> None:
    """Who is killed can end nothing any more."""
    code = "\n".join(
        (
            "import sys, time",
            "from pathlib import Path",
            "from penjing.serve.supervisor.temporary import temporary_server",
            "with temporary_server(Path(sys.argv[1]), ['num_blocks=64']) as address:",
            "    print(address, flush=True)",
            "    time.sleep(1000)",
        )
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tiny_long)], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        port = int(script.stdout.readline().rpartition(":")[2])
        found = state.read_state(port)
        assert found is not None
        script.kill()
    pids = (found.supervisor_pid, found.server_pid, found.stub_pid)
    assert all(pids)
    wait_until(lambda: not any(map(alive, pids)), 120, "the end of the server")
    assert leftovers(port) == []
