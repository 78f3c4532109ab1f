"""How a served decoder follows the list of its adapters, where something goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penjing.core.errors import InputError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.triton import adapter_watch
from penjing.serve.triton.adapter_list import (
    AdapterEntry,
    ServedAdapters,
    WantedAdapters,
    read_list,
    said_path,
    write_list,
)
from penjing.serve.triton.adapter_watch import AdapterWatch


class Loop:
    """Stands in for an engine's: does what it is asked, or is busy with a step."""

    def __init__(self) -> None:
        self.busy = False
        self.has: set[str] = set()
        self.engine = SimpleNamespace(
            adapters=SimpleNamespace(add=lambda name, _: self.has.add(name), remove=self.has.discard)
        )

    def between_steps(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        if not self.busy:
            work()
            future.set_result(None)
        return future


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    def load(_: Path, config: EngineConfig) -> dict[str, Any]:
        (name,) = config.adapters
        if name == "broken":
            raise InputError("it is damaged")
        if name == "strange":
            raise KeyError("rank")
        return {name: []}

    monkeypatch.setattr(adapter_watch, "load_adapters", load)
    monkeypatch.setattr(adapter_watch, "CHANGE_SECONDS", 0.05)
    return Loop()


def test_a_list_is_read_again_where_the_engine_took_long_over_a_step(loop: Loop, tmp_path: Path) -> None:
    """It was taken as read, so that the adapter never came, whoever waited for it."""
    path = tmp_path / "8001.adapters.json"
    watch = AdapterWatch(path, tmp_path, EngineConfig(), loop)  # type: ignore[arg-type]
    watch.look()
    write_list(path, WantedAdapters(id="1", adapters={"a": AdapterEntry(folder=tmp_path, id="x")}))
    loop.busy = True
    with pytest.raises(TimeoutError):
        watch.look()
    loop.busy = False
    watch.look()
    said = read_list(said_path(path), ServedAdapters)
    assert said is not None
    assert (said.id, list(said.adapters), loop.has) == ("1", ["a"], {"a"})


def test_what_is_wrong_with_one_adapter_is_said_and_the_others_come(loop: Loop, tmp_path: Path) -> None:
    path = tmp_path / "8001.adapters.json"
    watch = AdapterWatch(path, tmp_path, EngineConfig(), loop)  # type: ignore[arg-type]
    names = ("broken", "strange", "fine")
    write_list(path, WantedAdapters(id="1", adapters={n: AdapterEntry(folder=tmp_path, id="x") for n in names}))
    watch.look()
    said = read_list(said_path(path), ServedAdapters)
    assert said is not None
    assert (said.id, list(said.adapters)) == ("1", ["fine"])
    assert said.refused == {"broken": "it is damaged", "strange": "KeyError: 'rank'"}
