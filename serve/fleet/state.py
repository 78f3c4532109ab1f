"""What is known of several models of one command: `cache/run/PORT.fleet.json`, by the first one's gRPC port."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text
from penjing.serve.supervisor.state import is_running, lives, read_state, run_folder


@dataclass(frozen=True)
class FleetState:
    """What the process that keeps the models last wrote. `state`: starting, ready, not ready, draining, failed."""

    state: str
    port: int
    pid: int
    message: str = ""
    front_pid: int = 0
    front_url: str = ""
    command: str = ""
    """That starts all of it again, as it is now."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By what clients call them: `grpc_port`, `metrics_port`, `folder`, `share`, `restarts`, and of a decoder
    `kv_cache_bytes` and `kv_cache_tokens`."""


def fleet_path(port: int) -> Path:
    return run_folder() / f"{port}.fleet.json"


def write_first_fleet(state: FleetState) -> None:
    """Write `state` before anything starts, which nobody could find or stop without it.

    Raises:
        SetupError: the disk does not take it.
    """
    atomic_write_text(fleet_path(state.port), json.dumps(asdict(state), indent=2) + "\n")


def write_fleet(state: FleetState) -> bool:
    """Write `state`; False where the disk does not take it."""
    try:
        write_first_fleet(state)
    except (SetupError, OSError):
        return False
    return True


def read_fleet(port: int) -> FleetState | None:
    """What was last written; None when there is nothing that can be read."""
    try:
        values: Any = json.loads(fleet_path(port).read_text(encoding="utf-8"))
        return FleetState(**{field.name: values[field.name] for field in fields(FleetState)})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def is_alive(fleet: FleetState) -> bool:
    """Whether the process that wrote it keeps models still. One that was killed leaves its file; since then other
    servers may run on its ports, and another process may have its number."""
    if not lives(fleet.pid):
        return False
    ports = [int(model["grpc_port"]) for model in fleet.models.values()]
    servers = [read_state(port) for port in ports if is_running(port)]
    return all(server is None or server.fleet_pid == fleet.pid for server in servers)


def running_fleets() -> list[FleetState]:
    """Of all whose servers live."""
    ports = sorted(int(path.name.partition(".")[0]) for path in run_folder().glob("*.fleet.json"))
    states = [read_fleet(port) for port in ports]
    return [
        state
        for state in states
        if state is not None
        and is_alive(state)
        and any(is_running(model["grpc_port"]) for model in state.models.values())
    ]
