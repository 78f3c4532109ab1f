"""A supervisor in a process of its own, as `penjing serve --detach` starts it, on free ports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penjing.serve.client.client import Client
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig

SHARED_MEMORY_BYTES = 32 << 20
START_SECONDS = 120.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Seconds until `condition` was true; fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


class Served:
    """A running supervisor and ways to look at it from outside."""

    def __init__(self, model: Path, engine: dict[str, Any] | None = None, **config: Any) -> None:
        grpc_port, http_port, metrics_port, front_port = free_ports(4)
        if "front" in config:  # its port is ours to choose
            config = config | {"front": {"port": front_port} | config["front"]}
        values: dict[str, Any] = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port} | config
        self.config = ServeConfig(**values)
        self.address = f"127.0.0.1:{self.config.grpc_port}"
        engine_json = json.dumps({"num_blocks": 512} | (engine or {}))
        command = [sys.executable, "-m", "penjing.serve.supervisor.supervisor"]
        self.process = subprocess.Popen(
            [*command, str(model), self.config.model_dump_json(), engine_json], stderr=subprocess.PIPE, text=True
        )

    def wait_ready(self, restarts: int = 0) -> float:
        def ready() -> bool:
            assert self.process.poll() is None, f"the supervisor ended: {self.errors()}"
            found = self.state
            return found is not None and found.state == "ready" and found.restarts >= restarts

        return wait_until(ready, START_SECONDS, "getting ready")

    @property
    def state(self) -> state.ServerState | None:
        return state.read_state(self.config.grpc_port)

    @property
    def stub_pid(self) -> int:
        found = self.state
        assert found is not None
        assert found.stub_pid
        return found.stub_pid

    def errors(self) -> str:
        """What the ended supervisor wrote."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def client(self, **options: Any) -> Client:
        return Client(self.address, **({"timeout": 60.0, "retries": 0} | options))

    def health(self, path: str = "/v2/health/ready") -> int:
        """Status code of a health check; 0 without an answer in 0.3 s."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.config.http_port}{path}", timeout=0.3) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metrics(self) -> dict[str, float]:
        """penjing's metrics by name with labels, once they have caught up with the engine."""
        time.sleep(0.6)  # the adapter brings them up to date four times a second
        return self.shown_metrics()

    def shown_metrics(self) -> dict[str, float]:
        """The same as they are shown now, up to a quarter of a second old: for what is waited for anyway."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.config.metrics_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        lines = re.findall(r"^penjing:(\S+) (\S+)$", text, re.MULTILINE)
        return {re.sub(r',?model="llm",?|\{model="llm"\}', "", name).replace("{}", ""): float(v) for name, v in lines}

    def end(self) -> int:
        """Stop the supervisor if it runs; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            self.process.kill()
        assert self.process.stderr is not None
        code = self.process.wait()
        self.process.stderr.close()
        return code


@contextmanager
def serving(model: Path, engine: dict[str, Any] | None = None, **config: Any) -> Iterator[Served]:
    """A ready server, ended at the end."""
    served = Served(model, engine, **config)
    try:
        served.wait_ready()
        yield served
    finally:
        served.end()


def alive(pid: int) -> bool:
    """Whether a process exists that is not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def leftovers(port: int) -> list[str]:
    """Shared memory and state files that a server on `port` should not leave."""
    shared = [path.name for path in Path("/dev/shm").glob(f"{state.shm_prefix(port)}*")]
    files = (state.state_path(port), state.drain_path(port))
    return shared + [path.name for path in files if os.path.exists(path)]
