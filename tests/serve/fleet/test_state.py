"""What a fleet that was killed leaves is not taken for one that runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from penjing.core.errors import SetupError
from penjing.serve.fleet.change import found_fleet
from penjing.serve.fleet.state import FleetState, fleet_path, running_fleets, write_fleet
from penjing.serve.supervisor import state
from tests.serve.triton.serving import free_ports


@pytest.fixture
def port() -> Iterator[int]:
    port = free_ports(1)[0]
    state.run_folder().mkdir(parents=True, exist_ok=True)
    with state.owning(port):
        yield port
    fleet_path(port).unlink(missing_ok=True)


def listed(port: int, *, pid: int, of_server: int) -> bool:
    """Whether the fleet of process `pid` is, beside a server there that was started by the fleet of `of_server`."""
    write_fleet(FleetState("ready", port, pid, models={"llm:1": {"grpc_port": port}}))
    server = state.ServerState("ready", "build/a", "127.0.0.1", port, 0, port + 1, os.getpid(), fleet_pid=of_server)
    state.write_state(server)
    found = any(fleet.port == port for fleet in running_fleets())
    if not found:
        with pytest.raises(SetupError, match="without a name" if not of_server else "no server of models"):
            found_fleet(port)
    return found


def test_a_server_on_the_port_of_a_fleet_that_was_killed_is_none_of_it(port: int) -> None:
    """`penjing server status` showed the dead fleet as ready, and `penjing bench ab llm:1 …` asked the other server."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert listed(port, pid=os.getpid(), of_server=os.getpid())
    assert not listed(port, pid=ended.pid, of_server=0)
    assert not listed(port, pid=os.getppid(), of_server=0)  # another process has its number by now
    assert not listed(port, pid=ended.pid, of_server=os.getpid())
