"""The front as a process: up before the model, started again when it dies, drained with the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import ConfigError
from penjing.serve.gate.config import FrontConfig, front_config
from penjing.serve.supervisor import state
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import Served, alive, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]


def front_status(served: Served, path: str) -> int:
    """Status of a GET; 0 where nobody answers."""
    assert served.config.front is not None
    fronted = Fronted.__new__(Fronted)
    fronted.port, fronted.context = served.config.front.port, None
    try:
        return fronted.ask(path).status
    except OSError:
        return 0


def test_it_lives_before_the_model_comes_back_after_a_kill_and_drains(tiny_long: Path) -> None:
    served = Served(tiny_long, front={})
    try:
        wait_until(lambda: front_status(served, "/health/live") == 200, 60, "the front's start")
        served.wait_ready()
        assert front_status(served, "/health/ready") == 200
        found = served.state
        assert found is not None
        assert found.front_url == f"http://127.0.0.1:{served.config.front.port}"  # type: ignore[union-attr]
        os.kill(found.front_pid, signal.SIGKILL)
        wait_until(lambda: (now := served.state) and now.front_pid not in (0, found.front_pid), 10, "another front")
        wait_until(lambda: front_status(served, "/health/ready") == 200, 30, "readiness")
        again = served.state
        assert again is not None
        assert (again.server_pid, again.restarts) == (found.server_pid, 0)

        with served.client() as client:
            stream = client.stream("a tree", max_tokens=3000, temperature=0.0, ignore_eos=True)
            next(stream)
            threading.Thread(target=served.end).start()
            wait_until(lambda: front_status(served, "/health/ready") == 503, 10, "the drain")
            assert front_status(served, "/v1/models") in (0, 503)
            for _ in stream:
                pass
            assert stream.result.num_output_tokens == 3000
        wait_until(lambda: served.process.poll() is not None, 20, "the end")
        assert not alive(again.front_pid)
    finally:
        served.end()


def test_its_log_is_its_owners(front: Fronted) -> None:
    front.ask("/v1/models", headers={"x-request-id": "known-1"})
    path = state.front_log_path(front.served.config.grpc_port)
    wait_until(lambda: "known-1" in path.read_text(), 5, "the line of a request")
    assert path.stat().st_mode & 0o777 == 0o600


def test_flags_without_a_port_are_refused() -> None:
    assert front_config(None, "127.0.0.1", None, None, []) is None
    with pytest.raises(ConfigError, match="--openai 8080"):
        front_config(None, "127.0.0.1", Path("keys.toml"), None, [])
    with pytest.raises(ConfigError, match="max_body_bytes"):
        front_config(8080, "127.0.0.1", None, None, ["max_body=1"])


@pytest.mark.parametrize(
    ("changes", "url", "local"),
    [
        ({}, "http://127.0.0.1:8080", True),
        ({"host": "::1"}, "http://[::1]:8080", True),
        ({"host": "0.0.0.0", "certificate": "cert.pem"}, "https://0.0.0.0:8080", False),
    ],
)
def test_where_it_is_found(changes: dict[str, Any], url: str, local: bool) -> None:
    config = FrontConfig.model_validate({"port": 8080} | changes)
    assert (config.url, config.is_local) == (url, local)


@pytest.mark.parametrize(("soft", "hard", "found"), [(100, 1000, 700), (100, 300, 300), (900, 1000, 900)])
def test_there_are_descriptors_for_as_many_connections_as_may_come(soft: int, hard: int, found: int) -> None:
    """Most systems let a process have 1024 unless it asks for more: what came beyond these was reset, not refused."""
    code = (
        "import resource, sys; from penjing.serve.gate.config import FrontLimits; "
        "from penjing.serve.site.server import SPARE_DESCRIPTORS, allow_descriptors; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); "
        "allow_descriptors(FrontLimits(max_connections=(700 - SPARE_DESCRIPTORS) // 2)); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == f"({found}, {hard})"
    assert ("ulimit -n" in said.stderr) == (hard < 700)
