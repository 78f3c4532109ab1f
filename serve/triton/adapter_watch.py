"""Keeps the adapters of a served decoder as its list wants them, while answers run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from penjing.core.errors import PenjingError, SetupError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.loop import EngineLoop
from penjing.serve.runner.adapters import load_adapters
from penjing.serve.triton.adapter_list import (
    AdapterEntry,
    ServedAdapters,
    WantedAdapters,
    read_list,
    said_path,
    stamp_of,
    write_list,
)
from penjing.serve.triton.settings import reachable

CHANGE_SECONDS = 60.0  # until the engine, between two steps, has taken an adapter in

log = logging.getLogger(__name__)


class AdapterWatch:
    """`look` is called again and again, by one thread.

    Args:
        path: the list; see adapter_list.py.
        folder: of the model.
        config: of its engine, which has its `adapters`.
    """

    def __init__(self, path: Path, folder: Path, config: EngineConfig, loop: EngineLoop) -> None:
        self._path, self._folder, self._config, self._loop = path, folder, config, loop
        entries = {name: AdapterEntry(folder=where, id="") for name, where in config.adapters.items()}
        self._has = ServedAdapters(id="", adapters=entries)
        self._stamp: tuple[int, ...] = ()
        self._told = False

    def look(self) -> None:
        """Take in and give up adapters where the list has changed; one that is refused changes nothing else."""
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            wanted = read_list(self._path, WantedAdapters)
            if wanted is not None:
                self._follow(wanted)
            self._stamp = stamp  # not before: where the engine takes long over a step, the next look tries again
        if not self._told:
            try:
                write_list(said_path(self._path), self._has)
                self._told = True
            except SetupError as error:  # the disk is full: the next look tries again
                log.warning("which adapters there are cannot be written: %s", error)

    def _follow(self, wanted: WantedAdapters) -> None:
        has = dict(self._has.adapters)
        refused: dict[str, str] = {}
        for name in has.keys() - wanted.adapters.keys():
            self._loop.between_steps(lambda name=name: self._loop.engine.adapters.remove(name)).result(CHANGE_SECONDS)
            del has[name]
        for name, entry in wanted.adapters.items():
            if name in has and has[name].id == entry.id:
                continue
            try:
                self._take(name, entry)
            except TimeoutError:
                raise
            except PenjingError as error:
                refused[name] = str(error)
                log.warning("%s", error)
            except Exception as error:  # a defect of ours, which trying again would not mend
                refused[name] = f"{type(error).__name__}: {error}"
                log.exception("the adapter %s cannot be taken in", name)
            else:
                has[name] = entry
        self._has, self._told = ServedAdapters(id=wanted.id, adapters=has, refused=refused), False

    def _take(self, name: str, entry: AdapterEntry) -> None:
        config = self._config.model_copy(update={"adapters": reachable_folders({name: entry.folder})})
        (pairs,) = load_adapters(self._folder, config).values()  # reads and converts, beside the engine
        self._loop.between_steps(lambda: self._loop.engine.adapters.add(name, pairs)).result(CHANGE_SECONDS)


def reachable_folders(folders: Mapping[str, Path]) -> dict[str, Path]:
    """Folders as the Python inside Triton server finds them."""
    return {name: reachable(folder) for name, folder in folders.items()}
