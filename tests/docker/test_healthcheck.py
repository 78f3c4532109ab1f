"""The container's health check against real state files and real (or absent) servers."""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penjing.serve.supervisor import state

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker"))
import healthcheck


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port whose supervisor lives (this process holds its lock) and where a socket listens but no engine answers."""
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path))
    monkeypatch.setattr(healthcheck, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        state.run_folder().mkdir(parents=True)
        with open(state.run_folder() / f"{number}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield number


def write(port: int, name: str, message: str = "") -> None:
    state.write_state(
        state.ServerState(
            state=name,
            model="m",
            host="0.0.0.0",
            grpc_port=port,
            http_port=port + 1,
            metrics_port=port + 2,
            supervisor_pid=os.getpid(),
            message=message,
        )
    )


def test_no_server_is_unhealthy(tmp_path, monkeypatch):
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path))
    assert healthcheck.problem() == "no server is running"


def test_a_state_file_without_its_supervisor_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path))
    state.run_folder().mkdir(parents=True)
    (state.run_folder() / "8001.lock").touch()
    write(8001, "ready")
    assert healthcheck.problem() == "no server is running"


def test_before_the_first_state_it_is_starting(port):
    assert healthcheck.problem() == f"port {port}: starting"


@pytest.mark.parametrize("name", ["starting", "not ready", "restarting", "draining", "failed"])
def test_only_ready_is_healthy(port, name):
    write(port, name, "why")
    assert healthcheck.problem() == f"port {port}: {name} why"


def test_ready_is_not_believed_when_the_engine_does_not_answer(port):
    write(port, "ready")
    assert "the engine does not answer" in str(healthcheck.problem())
