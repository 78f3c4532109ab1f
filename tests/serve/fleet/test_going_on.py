"""What befalls one of several models, or a change of them, ends none of the others."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penjing.core.errors import SetupError
from penjing.core.progress import Silent
from penjing.serve.fleet.change import Answered, change_path, outcome_path
from penjing.serve.fleet.fleet import Fleet
from penjing.serve.fleet.names import read_names
from penjing.serve.fleet.plan import make_plan
from penjing.serve.gate.config import FrontConfig
from penjing.serve.supervisor import state
from penjing.serve.supervisor.detach import start_behind
from penjing.serve.supervisor.kept_front import KeptFront
from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.supervisor import _Supervisor
from penjing.serve.triton.adapter_list import AdapterEntry, ServedAdapters, said_path, write_list
from tests.serve.triton.serving import free_ports


@pytest.fixture
def folders(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> dict[str, Path]:
    original = make_tiny_checkpoint(max_position_embeddings=4096)
    return {name: shutil.copytree(original, tmp_path / name.replace(":", "-")) for name in ("llm:1", "llm:2")}


@pytest.fixture
def fleet(folders: dict[str, Path]) -> Iterator[Fleet]:
    port = free_ports(1)[0]
    named = read_names([f"{name}={folder}" for name, folder in folders.items()], [])
    plan = make_plan(named, ServeConfig(grpc_port=port, metrics_port=port + 1), [], kv_cache_bytes=4 << 20)
    state.run_folder().mkdir(parents=True, exist_ok=True)
    fleet = Fleet(plan, Silent())
    yield fleet
    for member in fleet.members:
        for path in (state.errors_path(member.port), outcome_path(member.port), change_path(member.port)):
            path.unlink(missing_ok=True)


def test_a_model_whose_folder_is_gone_goes_on(fleet: Fleet, folders: dict[str, Path]) -> None:
    """What the front must know was read of it again whenever an adapter of any model changed, or its process had
    started anew; that it could not be read ended all models."""
    before = [member.shown for member in fleet.members]
    shutil.rmtree(folders["llm:1"])
    fleet._show()
    assert [member.shown for member in fleet.members] == before
    assert [(shown.id, shown.kind, shown.group, shown.version) for shown in before] == [
        ("llm:1", "llm", "llm", 1),
        ("llm:2", "llm", "llm", 2),
    ]


def test_a_single_model_whose_folder_is_gone_goes_on(folders: dict[str, Path]) -> None:
    """An adapter that was removed then ended it."""
    port, folder = free_ports(1)[0], folders["llm:1"]
    supervisor = _Supervisor(Mock(), folder, ServeConfig(grpc_port=port, metrics_port=port + 1), "{}", Silent())
    before = supervisor._shown()
    shutil.rmtree(folder)
    said = said_path(state.adapters_path(port))
    said.parent.mkdir(parents=True, exist_ok=True)
    write_list(said, ServedAdapters(id="", adapters={"a": AdapterEntry(folder=folder, id="")}))
    try:
        supervisor._keep_front()
        assert supervisor._shown() == before.model_copy(update={"adapters": ("a",)})
    finally:
        said.unlink()
        state.state_path(port).unlink(missing_ok=True)


def test_nothing_is_started_on_a_full_disk(
    fleet: Fleet, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It started, and answered; but `penjing serve --detach` waited for its state without an end, and `penjing stop`
    said that there is no server."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    port = free_ports(1)[0]
    supervisor = _Supervisor(
        Mock(), folders["llm:1"], ServeConfig(grpc_port=port, metrics_port=port + 1), "{}", Silent()
    )
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(state, "run_folder", lambda: tmp_path)
    for start in (supervisor.run, fleet.run):
        with pytest.raises(SetupError, match=r"cannot write .*\.json: the disk is full; free some space and run again"):
            start()
    with pytest.raises(SetupError, match="the disk is full"):  # which took no last words of it either
        start_behind(["false"], state.errors_path(port), lambda _: False, "it ended without a word")
    assert not state.state_path(port).exists()
    assert not any(member.ready for member in fleet.members)


def test_a_machine_without_room_for_processes_ends_no_model(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    full = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def refuse(*_: Any, **__: Any) -> None:
        raise full

    monkeypatch.setattr(subprocess, "Popen", refuse)
    member = fleet.members[0]
    line = member.keep()
    assert line is not None
    refused = "no process can be started: [Errno 11] Resource temporarily unavailable; end other programs and run again"
    assert line == f"its supervisor cannot be started: {refused}; restarting"
    model = fleet.plan.models[0].model_copy(update={"id": "llm:3", "version": 3})
    change_path(fleet.port).write_text(f'{{"id": "x", "load": {model.model_dump_json()}}}')
    said = None
    while said is None:
        said = fleet.changer.step()
    assert said == refused
    outcome = Answered.model_validate_json(outcome_path(fleet.port).read_text())
    assert (outcome.id, outcome.said, outcome.failed) == ("x", said, True)
    assert not fleet.changer.between
    assert [member.model.id for member in fleet.members] == ["llm:1", "llm:2"]


@pytest.mark.parametrize("front", [False, True])
def test_a_first_start_without_room_for_processes_is_an_error(
    front: bool, fleet: Fleet, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with Python's own lines, of the front as of a supervisor, and no state said why."""

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    port = free_ports(1)[0]
    config = ServeConfig(grpc_port=port, metrics_port=port + 1)
    starts = [fleet.run]
    refused = "no process"
    if front:
        refused = "the HTTP front"
        shown = FrontConfig(port=free_ports(1)[0])
        fleet.front = KeptFront(shown, (), port)
        alone = config.model_copy(update={"front": shown})
        starts.append(_Supervisor(Mock(), folders["llm:1"], alone, "{}", Silent()).run)
    else:
        starts.append(lambda: start_behind(["false"], state.errors_path(port), lambda _: False, "it ended"))
    said: list[str] = []
    monkeypatch.setattr(fleet, "_note", lambda *words: said.append(" ".join(words)))
    for start in starts:
        with pytest.raises(SetupError, match=rf"^{refused} can(not)? be started: \[Errno 11\] .*; end other programs"):
            start()
    assert said[-1].startswith(f"failed {refused}")
