"""`penjing stop`."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from penjing.core.errors import ServerError, SetupError
from penjing.core.files import atomic_write_text
from penjing.serve.supervisor import state

POLL_SECONDS = 0.05


def stop(grpc_port: int = 8001, *, timeout: float = 30.0) -> None:
    """Drain and end the server on `grpc_port`, and those that were started with it for other models; after `timeout`
    seconds they end at once.

    Raises:
        ServerError: one did not end.
    """
    found = state.read_state(grpc_port)
    if found is None or not state.is_running(grpc_port):
        state.clean_up(grpc_port)
        print(f"no penjing server runs on gRPC port {grpc_port}", file=sys.stderr)
        return
    ports = state.fleet_ports(found)
    for port in ports:
        with suppress(SetupError):  # the disk is full: the server takes its own time
            atomic_write_text(state.drain_path(port), f"{timeout}\n")
    pid = found.fleet_pid or found.supervisor_pid
    for number, patience in ((signal.SIGTERM, timeout + 15.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not any(map(state.is_running, ports)) and not (found.fleet_pid and state.lives(found.fleet_pid)):
                for port in ports:
                    state.clean_up(port)
                print(f"{_servers(ports)} {'has' if len(ports) == 1 else 'have'} stopped", file=sys.stderr)
                return
            time.sleep(POLL_SECONDS)
    raise ServerError(f"process {pid} of {_servers(ports)} does not end; kill it")


def _servers(ports: list[int]) -> str:
    kind = "server on gRPC port" if len(ports) == 1 else "servers on gRPC ports"
    return f"the {kind} {', '.join(map(str, ports))}"
