"""What several models of one command are served with: where each listens, its settings, and its part of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.base import family_at, read_overrides
from penjing.serve.fleet.budget import Cache, share_memory
from penjing.serve.fleet.names import Named
from penjing.serve.gate.config import FrontConfig
from penjing.serve.supervisor.process import ServeConfig

PORT_STEP = 2  # gRPC 8001, 8003 … and metrics 8002, 8004 …


class FleetModel(Config):
    """One of the models."""

    id: str = Field(description="What clients call it; of a version NAME:VERSION.")
    group: str | None = Field(default=None, description="The name under which versions share requests.")
    version: int | None = Field(default=None, description="Of the group.")
    share: float = Field(default=1.0, description="Of the group's requests.")
    folder: Path = Field(description="Its artifact or checkpoint.")
    engine_json: str = Field(description="Its settings.")
    config: ServeConfig = Field(description="Where its Triton server listens.")
    kv_cache: Cache | None = Field(default=None, description="The memory of keys and values that a decoder has.")

    @property
    def endpoint(self) -> str:
        """Where clients find it, and how much it keeps, for the terminal."""
        cache = "" if self.kv_cache is None else f", {self.kv_cache.described}"
        return f"{self.id}: gRPC {self.config.address(self.config.grpc_port)}{cache}"


class FleetPlan(Config):
    """All that the process which keeps the models is told."""

    models: tuple[FleetModel, ...] = Field(min_length=1, description="What is served.")
    front: FrontConfig | None = Field(default=None, description="The HTTP front before all of them.")

    @property
    def port(self) -> int:
        """By which the whole is known: the first model's gRPC port."""
        return self.models[0].config.grpc_port

    @property
    def names(self) -> str:
        """Of all models."""
        return ", ".join(model.id for model in self.models)

    @property
    def endpoints(self) -> str:
        """Where clients find what, for the terminal."""
        front = [] if self.front is None else [f"OpenAI {self.front.url}/v1"]
        return "; ".join(front + [model.endpoint for model in self.models])


def make_plan(
    models: Sequence[Named],
    base: ServeConfig,
    overrides: Sequence[str],
    decoder_settings: Sequence[str] = (),
    kv_cache_bytes: int | None = None,
) -> FleetPlan:
    """Decide everything, before anything is started.

    Args:
        base: where the first model's server listens; the others' ports follow, and the front's is of all.
        overrides: `NAME.KEY=VALUE`, of all versions of NAME, or `NAME:VERSION.KEY=VALUE`.
        decoder_settings: `KEY=VALUE` of each decoder.
        kv_cache_bytes: of the key-value caches of all decoders together; None: a share of the free memory.

    Raises:
        InputError: a folder holds no model that can be served.
        ConfigError: a setting that is wrong or of no model, equal ports, caches that do not fit the memory.
    """
    if base.http_port is not None:
        raise ConfigError("--http-port is for a server of one model; leave it out, or serve the models one by one")
    by_model = _overrides(models, overrides)
    planned: list[FleetModel] = []
    engines: dict[str, EngineConfig] = {}
    for index, model in enumerate(models):
        family = family_at(model.folder)
        is_decoder = family.settings is EngineConfig
        settings = read_overrides(family.settings, [*(decoder_settings if is_decoder else ()), *by_model[model.id]])
        config = base.model_copy(
            update={
                "front": None,
                "grpc_port": base.grpc_port + PORT_STEP * index,
                "metrics_port": base.metrics_port + PORT_STEP * index,
                "model_name": model.name,
                "model_version": model.version or 1,
            }
        )
        planned.append(
            FleetModel(
                id=model.id,
                group=None if model.version is None else model.name,
                version=model.version,
                share=model.share,
                folder=family.check(model.folder, settings),
                engine_json=settings.model_dump_json(exclude_unset=True),
                config=config,
            )
        )
        if isinstance(settings, EngineConfig):
            engines[model.id] = settings
    _check_ports(planned, base.front)
    folders = {model.id: model.folder for model in planned}
    caches = share_memory(engines, folders, kv_cache_bytes) if engines else {}
    return FleetPlan(models=tuple(_with_cache(model, engines, caches) for model in planned), front=base.front)


def _with_cache(model: FleetModel, engines: Mapping[str, EngineConfig], caches: Mapping[str, Cache]) -> FleetModel:
    if model.id not in engines:
        return model
    settings, cache = engines[model.id], caches[model.id]
    if settings.num_blocks is None:
        values = settings.model_dump(exclude_unset=True) | {"kv_cache_bytes": cache.bytes}
        settings = parse_config(EngineConfig, values, f"settings of {model.id}")
    return model.model_copy(update={"engine_json": settings.model_dump_json(exclude_unset=True), "kv_cache": cache})


def _overrides(models: Sequence[Named], overrides: Sequence[str]) -> dict[str, list[str]]:
    """The settings of each model, without its name before them."""
    found: dict[str, list[str]] = {model.id: [] for model in models}
    for override in overrides:
        owners = [
            (len(name), model.id, override.removeprefix(f"{name}."))
            for model in models
            for name in {model.id, model.name}
            if override.startswith(f"{name}.")
        ]
        longest = max((length for length, *_ in owners), default=0)  # names may have dots in them
        for length, owner, text in owners:
            if length == longest:
                found[owner].append(text)
        if not owners:
            example = f"{models[0].id}.{override.rpartition('.')[2]}"
            raise ConfigError(f"--set {override}: say of which model, such as --set {example}")
    return found


def _check_ports(models: Sequence[FleetModel], front: FrontConfig | None) -> None:
    seen = {} if front is None else {front.port: "--openai"}
    for model in models:
        for flag, port in model.config.ports().items():
            name = f"{flag} of {model.id}"
            if port > 65535:
                raise ConfigError(f"{name} would be {port}; choose a lower {flag}: each model takes the next but one")
            if port in seen:
                raise ConfigError(
                    f"{seen[port]} and {name} are both {port}; choose another {flag}: each model takes the next but one"
                )
            seen[port] = name
