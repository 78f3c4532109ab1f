"""The work folder of a run: what is complete is kept for one key and one process, and what is damaged is named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penjing.core.errors import InputError, SetupError
from penjing.core.work import WorkFolder


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"name": "a", "more": 1}), "[" * 100_000])
def test_a_record_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    with WorkFolder(tmp_path / "out", "key") as work:
        assert work.record("prune") is None
        assert work.run("prune", lambda: {"removed": 3}).result == work.run("prune", dict).result == {"removed": 3}
        (work.path / "prune.json").write_text(content)
        with pytest.raises(InputError, match=r"prune\.json"):
            work.record("prune")


def test_what_another_key_left_is_not_gone_on_with(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "out", "one") as work:
        assert work.run("first", lambda: {"value": 1}).result == {"value": 1}
    with WorkFolder(tmp_path / "out", "one") as work:
        assert work.num_complete() == 1
        assert work.run("first", lambda: {"value": 2}).result == {"value": 1}
    with WorkFolder(tmp_path / "out", "two") as work:
        assert work.num_complete() == 0
        assert work.run("first", lambda: {"value": 2}).result == {"value": 2}


def test_two_runs_on_one_output_do_not_meet(tmp_path: Path) -> None:
    with (
        WorkFolder(tmp_path / "out", "key"),
        pytest.raises(SetupError, match="another process is working in"),
        WorkFolder(tmp_path / "out", "key"),
    ):
        pass


def test_a_run_that_did_nothing_leaves_no_folder(tmp_path: Path) -> None:
    def refused() -> None:
        with WorkFolder(tmp_path / "out", "key"):
            raise InputError("the texts are too short; give longer ones")

    with pytest.raises(InputError, match="too short"):
        refused()
    assert not list(tmp_path.iterdir())
    with WorkFolder(tmp_path / "out", "key") as work:
        work.run("first", dict)
    assert work.path.is_dir()


def test_a_folder_that_its_holder_removes_while_it_is_opened_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def removed_meanwhile(path: Path, flags: int) -> int:
        monkeypatch.undo()
        lock = opened(path, flags)
        path.rmdir()
        return lock

    monkeypatch.setattr("penjing.core.work.os.open", removed_meanwhile)
    with WorkFolder(tmp_path / "out", "key") as work:
        assert work.run("first", lambda: {"value": 1}).result == {"value": 1}
        assert work.record("first") is not None
