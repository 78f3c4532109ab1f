"""The command that starts a server as it is now, after its models, shares and adapters have changed."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from penjing.core.config import inline_toml
from penjing.serve.fleet.plan import FleetModel, FleetPlan
from penjing.serve.gate.config import FrontConfig, FrontLimits
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.triton.adapter_list import ServedAdapters, read_list, said_path


def command_again(plan: FleetPlan) -> str:
    """A line for the shell. Ports behind the first model's follow anew, and a key-value cache is what it is now."""
    words = ["penjing", "serve", *(f"{model.id}={model.folder}" for model in plan.models)]
    if plan.front is not None:
        words += _shares(plan)
    for model in plan.models:
        words += _settings(model)
    first, usual = plan.models[0].config, ServeConfig()
    if first.grpc_port != usual.grpc_port:
        words += ["--grpc-port", str(first.grpc_port)]
    if first.metrics_port != usual.metrics_port:
        words += ["--metrics-port", str(first.metrics_port)]
    if plan.front is not None:
        words += _front(plan.front)
    elif first.host != usual.host:
        words += ["--host", first.host]
    return shlex.join(words)


def _shares(plan: FleetPlan) -> Iterator[str]:
    """Of every version, where a model has several."""
    versions = Counter(model.group for model in plan.models if model.group is not None)
    for model in plan.models:
        if model.group is not None and versions[model.group] > 1:
            yield from ("--share", f"{model.id}={model.share!r}")  # every digit: the sum must be 1 again


def _settings(model: FleetModel) -> Iterator[str]:
    values: dict[str, Any] = json.loads(model.engine_json)
    begun = values.pop("adapters", {})
    said = read_list(said_path(state.adapters_path(model.config.grpc_port)), ServedAdapters)
    adapters = begun if said is None else {name: entry.folder for name, entry in said.adapters.items()}
    for name, folder in adapters.items():
        yield from ("--adapter", f"{model.id}:{name}={folder}")
    for name, value in values.items():
        yield from ("--set", f"{model.id}.{name}={_shown(value)}")


def _front(front: FrontConfig) -> Iterator[str]:
    yield from ("--openai", str(front.port))
    if front.host != FrontConfig.model_fields["host"].default:
        yield from ("--host", front.host)
    if front.keys is not None:
        yield from ("--keys", str(front.keys))
    if front.certificate is not None:
        yield from ("--tls", str(front.certificate), str(front.private_key))
    limits: Mapping[str, Any] = front.limits.model_dump(mode="json")
    usual = FrontLimits().model_dump(mode="json")
    for name, value in limits.items():
        if value != usual[name]:
            yield from ("--front", f"{name}={_shown(value)}")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else inline_toml(value)
