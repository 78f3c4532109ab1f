"""`penjing server status`."""

from __future__ import annotations

from typing import Any

from penjing.core.progress import print_table
from penjing.serve.supervisor import state
from penjing.serve.supervisor.install import status


def status_to_terminal() -> None:
    """Which Triton server would run, and what runs."""
    table: dict[str, Any] = {"installed": status()}
    for port in state.running_ports():
        found = state.read_state(port)
        if found is not None:
            http = f"HTTP {found.http_port}, " if found.http_port else ""
            table[f"port {port}"] = {
                "state": found.state + (f" ({found.message})" if found.message else ""),
                "model": found.model,
                "endpoints": f"gRPC {found.grpc_port}, {http}metrics {found.metrics_port}",
                **({"front": f"{found.front_url}/v1"} if found.front_url else {}),
                "restarts": found.restarts,
                "log": found.log,
            }
    print_table(table)
