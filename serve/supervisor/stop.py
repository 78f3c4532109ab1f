"""`penjing stop`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from penjing.core.errors import ServerError, SetupError
from penjing.core.files import atomic_write_text
from penjing.serve.supervisor import state

POLL_SECONDS = 0.05
STATE_SECONDS = 2.0  # a server writes its state as it starts, and removes it as it ends


def _show(line: str) -> None:
    print(line, file=sys.stderr)


def stop(grpc_port: int = 8001, *, timeout: float = 30.0, tell: Callable[[str], None] = _show) -> None:
    """Drain and end the server on `grpc_port`, and those that were started with it for other models; after `timeout`
    seconds they end at once.

    Args:
        tell: is given the line that says what has stopped.

    Raises:
        ServerError: one did not end, or nothing says which process it is.
    """
    found = _running(grpc_port)
    if found is None:
        state.clean_up(grpc_port)
        tell(f"no penjing server runs on gRPC port {grpc_port}")
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
                tell(f"{_servers(ports)} {'has' if len(ports) == 1 else 'have'} stopped")
                return
            time.sleep(POLL_SECONDS)
    raise ServerError(f"process {pid} of {_servers(ports)} does not end; kill it")


def _running(grpc_port: int) -> state.ServerState | None:
    """What the server there has written; None where there is none."""
    deadline = time.monotonic() + STATE_SECONDS
    while state.is_running(grpc_port):
        if (found := state.read_state(grpc_port)) is not None:
            return found
        if time.monotonic() > deadline:  # it lives, and what it needs must not be cleaned up behind it
            raise ServerError(
                f"a penjing server has gRPC port {grpc_port}, but {state.state_path(grpc_port)} does not say which "
                "process it is; is the disk full? Free some space, and run again in a second"
            )
        time.sleep(POLL_SECONDS)
    return None


def _servers(ports: list[int]) -> str:
    kind = "server on gRPC port" if len(ports) == 1 else "servers on gRPC ports"
    return f"the {kind} {', '.join(map(str, ports))}"
