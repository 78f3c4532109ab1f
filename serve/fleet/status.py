"""`penjing server status`."""

from __future__ import annotations

from typing import Any

from penjing.core.progress import print_table, volume
from penjing.serve.fleet.state import running_fleets
from penjing.serve.supervisor import state
from penjing.serve.supervisor.install import status


def status_to_terminal() -> None:
    """Which Triton server would run, and what runs."""
    table: dict[str, Any] = {"installed": status()}
    for fleet in running_fleets():
        shared = {
            name: f"{model['share']:.0%} of {name.partition(':')[0]}"
            for name, model in fleet.models.items()
            if ":" in name
        }
        caches = {
            name: f"{volume(model['kv_cache_bytes'])} for {model['kv_cache_tokens']:,} tokens"
            for name, model in fleet.models.items()
            if "kv_cache_bytes" in model
        }
        table[f"models from port {fleet.port}"] = {
            "state": fleet.state + (f" ({fleet.message})" if fleet.message else ""),
            "names": ", ".join(f"{name} (gRPC {model['grpc_port']})" for name, model in fleet.models.items()),
            **({"shares": shared} if shared else {}),
            **({"key-value caches": caches} if caches else {}),
            **({"front": f"{fleet.front_url}/v1"} if fleet.front_url else {}),
        }
    for port in state.running_ports():
        found = state.read_state(port)
        if found is not None and found.model:
            http = f"HTTP {found.http_port}, " if found.http_port else ""
            table[f"port {port}"] = {
                "state": found.state + (f" ({found.message})" if found.message else ""),
                "name": found.name,
                "model": found.model,
                "endpoints": f"gRPC {found.grpc_port}, {http}metrics {found.metrics_port}",
                **({"front": f"{found.front_url}/v1"} if found.front_url else {}),
                "restarts": found.restarts,
                "log": found.log,
            }
    print_table(table)
