"""What `penjing models` does: it asks the process that keeps the models, and says what became of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from penjing.core.errors import ConfigError, SetupError
from penjing.core.progress import print_table
from penjing.serve.fleet.change import ask_for, found_fleet
from penjing.serve.fleet.names import UNSHARED, read_names
from penjing.serve.fleet.plan import PORT_STEP, make_plan
from penjing.serve.fleet.state import FleetState
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig, check_ports

MAX_TRIES = 1000


def load_to_terminal(
    port: int,
    argument: str,
    share: float,
    overrides: Sequence[str],
    kv_cache_bytes: int | None,
) -> None:
    """Load the model of `argument`, NAME=FOLDER or NAME:VERSION=FOLDER, beside those that are served.

    Raises:
        ConfigError: a wrong name, share or setting.
        InputError: the folder holds no model that can be served.
        SetupError: nothing is served from `port`, or another change is under way.
        ServerError: it could not be loaded; the others go on.
    """
    found = found_fleet(port)
    if share:
        _check_shared(found)
    if not 0 <= share <= 1:
        raise ConfigError(f"--share {share:g}: a share lies between 0 and 1")
    (model,) = read_names([argument], [])
    if share and model.version is None:
        raise ConfigError(f"--share is of versions: write {model.name}:2={model.folder}")
    settings = [f"{model.id}.{override}" for override in overrides]
    base = _free_ports(found.models)
    (planned,) = make_plan([model], base, settings, (), kv_cache_bytes).models
    print(f"loading {model.id}", file=sys.stderr)
    _say(ask_for(port, found.pid, load=planned.model_copy(update={"share": share})))


def unload_to_terminal(port: int, name: str) -> None:
    """Take a model away when its answers have ended; see `load_to_terminal`."""
    _say(ask_for(port, found_fleet(port).pid, unload=name))


def share_to_terminal(port: int, texts: Sequence[str]) -> None:
    """Move requests between versions: NAME:VERSION=SHARE; see `load_to_terminal`."""
    given: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            raise ConfigError(f"{text!r} is no share of a version; write llm:2=0.1") from None
    found = found_fleet(port)
    _check_shared(found)
    _say(ask_for(port, found.pid, shares=given))


def rollback_to_terminal(port: int, name: str) -> None:
    """Give the versions of a model the shares they had before the last change; see `load_to_terminal`."""
    found = found_fleet(port)
    _check_shared(found)
    _say(ask_for(port, found.pid, back=name))


def _check_shared(found: FleetState) -> None:
    """That there is a front, which alone shares requests."""
    if not found.front_url:
        raise ConfigError(f"the server on gRPC port {found.port} {UNSHARED}")


def show_models(port: int) -> None:
    """Names, states, shares, ports and folders."""
    fleet = found_fleet(port)
    models = fleet.models
    table: dict[str, Any] = {}
    for name, model in models.items():
        port_of_model = int(model["grpc_port"])
        found = state.read_state(port_of_model)
        share = {"share": f"{model['share']:.1%}"} if ":" in name else {}
        now = "starting" if found is None else found.state
        table[name] = {"state": now, **share, "gRPC": port_of_model, "folder": model["folder"]}
    print_table(table)
    _say(f"changes are not kept when the server ends; this starts it as it is now: {fleet.command}")


def _free_ports(models: dict[str, dict[str, Any]]) -> ServeConfig:
    """Ports behind those of the other models."""
    grpc = max(int(model["grpc_port"]) for model in models.values())
    metrics = max(int(model["metrics_port"]) for model in models.values())
    for step in range(PORT_STEP, PORT_STEP * MAX_TRIES, PORT_STEP):
        if max(grpc, metrics) + step > 65535:
            break
        config = ServeConfig(grpc_port=grpc + step, metrics_port=metrics + step)
        try:
            check_ports(config)
        except (SetupError, ConfigError):
            continue
        if not state.is_running(config.grpc_port):
            return config
    raise SetupError(f"no two ports are free above {grpc} and {metrics}; start the server on lower ones")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
