"""A server with its front that chaos may hurt, and what can be seen of it from outside."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penjing.core.errors import PenjingError
from penjing.serve.client.client import Client
from penjing.serve.gate.config import FrontConfig
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.stop import stop
from penjing.serve.supervisor.supervisor import serve

PROMPTS = ("Once upon a time", "The bonsai", "def main():", "Water boils at")
CANARY_TOKENS = 16
RECOVER_SECONDS = 120.0


class Patient:
    """The running server."""

    def __init__(self, config: ServeConfig, model: str) -> None:
        assert config.front is not None, "chaos comes through the front too"
        self.config, self.front_port, self.model = config, config.front.port, model
        self.address = f"127.0.0.1:{config.grpc_port}"

    @property
    def state(self) -> state.ServerState:
        found = state.read_state(self.config.grpc_port)
        assert found is not None, "the supervisor has ended"
        return found

    def pids(self) -> dict[str, int]:
        """Of the processes, by name."""
        found = self.state
        return {"stub": found.stub_pid, "server": found.server_pid, "front": found.front_pid}

    def is_over(self, name: str, pid: int) -> bool:
        """Whether the process that was stopped as `pid` goes on, or another is in its place."""
        try:
            stopped = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            stopped = False
        return not stopped and self.pids()[name] != 0

    def memory(self) -> int:
        """Resident bytes of all three."""
        return sum(resident(pid) for pid in self.pids().values())

    def figures(self) -> dict[str, float]:
        """The server's own figures, by name without labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.config.metrics_port, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return {name: float(value) for name, value in re.findall(r"^penjing:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)}

    def is_ready(self) -> bool:
        """Whether the front says so, within a second."""
        connection = http.client.HTTPConnection("127.0.0.1", self.front_port, timeout=1)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def canaries(self) -> list[str]:
        """Greedy answers by gRPC and through the front, to prompts that are always the same."""
        sampling = {"max_tokens": CANARY_TOKENS, "temperature": 0, "ignore_eos": True}
        with Client(self.address, timeout=120, retries=20) as client:
            answers = [client.generate(prompt, **sampling).text for prompt in PROMPTS]
        for prompt in PROMPTS:
            body = {"model": self.model, "prompt": prompt, "max_tokens": CANARY_TOKENS, "temperature": 0}
            connection = http.client.HTTPConnection("127.0.0.1", self.front_port, timeout=120)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answers.append(json.loads(connection.getresponse().read())["choices"][0]["text"])
            connection.close()
        return answers

    def seconds_to_recover(self) -> float | None:
        """Until front and gRPC give a token again; None if they do not."""
        started = time.monotonic()
        while time.monotonic() - started < RECOVER_SECONDS:
            if self.is_ready():
                try:
                    with Client(self.address, timeout=30, retries=0) as client:
                        client.generate("a", max_tokens=1)
                    return time.monotonic() - started
                except PenjingError:
                    pass
            time.sleep(0.05)
        return None


@contextmanager
def served(model: Path, *settings: str) -> Iterator[Patient]:
    """A server on free ports of loopback with these settings of the engine, stopped at the end."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    grpc_port, metrics_port, front_port = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    config = ServeConfig(grpc_port=grpc_port, metrics_port=metrics_port, front=FrontConfig(port=front_port))
    try:
        overrides = ["max_waiting_requests=4096", *settings]
        serve(model, config, detach=True, tied=True, engine_overrides=overrides)
        yield Patient(config, model.name)
    finally:
        stop(grpc_port)


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether `condition` came true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 where there is none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
