"""What `penjing adapters` does: adapters of a decoder that is served come and go."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penjing.core.config import apply_override, parse_config
from penjing.core.errors import ConfigError, ServerError, SetupError
from penjing.core.progress import print_table
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.base import family_at
from penjing.serve.fleet.change import alone
from penjing.serve.fleet.names import adapter_settings
from penjing.serve.fleet.state import is_alive, read_fleet
from penjing.serve.supervisor import state
from penjing.serve.triton.adapter_list import (
    AdapterEntry,
    ServedAdapters,
    WantedAdapters,
    read_list,
    said_path,
    write_list,
)

POLL_SECONDS = 0.05
ANSWER_SECONDS = 180.0
FRONT_SECONDS = 0.5  # from the model's word to the front's: the supervisor looks twenty times a second

Entries = dict[str, AdapterEntry]


class _Model(NamedTuple):
    name: str
    port: int
    folder: Path


def add_adapter(port: int, text: str) -> None:
    """Serve the adapter of `text`, [MODEL:]NAME=FOLDER, from now on; of all versions of MODEL. One of that name before
    is replaced.

    Raises:
        ConfigError: no folder, a wrong name, no such model, an adapter of another kind than LoRA.
        InputError: a folder that is missing, damaged, pickled, or of another network.
        SetupError: nothing runs, it takes no adapters now, or another change is under way.
        ServerError: it was refused; those that run are untouched.
    """
    said, _, given = text.partition("=")
    if not said or not given:
        if said and Path(said).is_dir():  # a folder without a name
            place = Path(said).absolute()
            example = f"{(place.parent if place.name == 'adapter' else place).name}={said}"
        else:
            example = f"{said or 'alice'}=build/{said.rpartition(':')[2] or 'alice'}"
        raise ConfigError(f"{text!r} does not say which folder has which name; write NAME=FOLDER, such as {example}")
    models, adapter = _models(port, said)
    values: dict[str, Any] = {}
    (setting,) = adapter_settings([f"{adapter}={given}"], named=False)
    apply_override(values, setting)
    folder = parse_config(EngineConfig, values, f"--adapter {text}").adapters[adapter]
    for model in models:
        settings = EngineConfig(adapters={adapter: folder})
        family = family_at(model.folder)
        if family.settings is not EngineConfig:
            raise ConfigError(f"{model.name} is no decoder, which alone have adapters")
        family.check(model.folder, settings)
    entry = AdapterEntry(folder=folder, id=secrets.token_hex(8))
    for model in models:
        _change(model, adapter, lambda entries: entries | {adapter: entry})
    print(f"{said} is served", file=sys.stderr)


def remove_adapter(port: int, said: str) -> None:
    """Refuse requests for an adapter, [MODEL:]NAME, from now on; answers that it has begun go on. See `add_adapter`."""
    models, adapter = _models(port, said)
    for model in models:
        if adapter not in _served(model).adapters:
            raise ConfigError(f"{model.name} has no adapter {adapter!r}; it has {_names(model)}")
    for model in models:
        _change(model, adapter, lambda entries: {n: entry for n, entry in entries.items() if n != adapter})
    print(f"{said} is served no more", file=sys.stderr)


def show_adapters(port: int) -> None:
    """Names and folders."""
    table: dict[str, Any] = {}
    for model in _all(port):
        said = read_list(said_path(state.adapters_path(model.port)), ServedAdapters)
        for name, entry in ({} if said is None else said.adapters).items():
            table[f"{model.name}:{name}"] = str(entry.folder)
    print_table(table or {"adapters": "none"})


def _models(port: int, said: str) -> tuple[list[_Model], str]:
    """Whose adapter is meant, and its name."""
    name, colon, adapter = said.rpartition(":")
    models = _all(port)
    if len(models) == 1 and not colon:
        return models, adapter
    found = [model for model in models if name in (model.name, model.name.partition(":")[0])]
    if not found:
        known = ", ".join(model.name for model in models)
        raise ConfigError(f"{said!r}: say whose adapter it is, such as {models[0].name}:{adapter}; there is {known}")
    return found, adapter


def _all(port: int) -> list[_Model]:
    fleet = read_fleet(port)
    if fleet is not None and is_alive(fleet):
        return [_Model(name, model["grpc_port"], Path(model["folder"])) for name, model in fleet.models.items()]
    found = state.read_state(port)
    if found is None or not state.is_running(port):
        raise SetupError(
            f"no penjing server runs on gRPC port {port}; start one with 'penjing serve', or name its port"
        )
    return [_Model(found.name, port, Path(found.model))]


def _change(model: _Model, adapter: str, change: Callable[[Entries], Mapping[str, AdapterEntry]]) -> None:
    path = state.adapters_path(model.port)
    with alone(path.with_name(f"{model.port}.adapters.lock")):
        wanted = WantedAdapters(id=secrets.token_hex(8), adapters=dict(change(_served(model).adapters)))
        write_list(path, wanted)
        deadline = time.monotonic() + ANSWER_SECONDS
        while (found := _served(model)).id != wanted.id:
            if time.monotonic() > deadline or not state.is_running(model.port):
                raise ServerError(f"{model.name} did not answer; its log says why")
            time.sleep(POLL_SECONDS)
    if adapter in found.refused:
        raise ServerError(f"{found.refused[adapter]}; {model.name} has the adapters that it had")
    time.sleep(FRONT_SECONDS)


def _served(model: _Model) -> ServedAdapters:
    said = read_list(said_path(state.adapters_path(model.port)), ServedAdapters)
    if said is None:
        raise SetupError(f"{model.name} takes no adapters now: it starts, or is no decoder; try again when it is ready")
    return said


def _names(model: _Model) -> str:
    return ", ".join(_served(model).adapters) or "none"
