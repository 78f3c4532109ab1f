"""What is typed wrong at `penjing train --launch` is one line that names the setting, before anything is started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penjing.core import cli
from penjing.core.errors import ConfigError, InputError
from penjing.train.launch import launch as launching
from penjing.train.launch.launch import launch

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(
    ("recipe", "processes", "settings", "message"),
    [
        ("decoder-tiny", 9, ("dp=2", "tp=2", "pp=2"), "parallel.dp=2 × pp=2 × cp=1 × tp=2 needs 8 processes"),
        ("decoder-tiny", 2, ("tp=2",), "parallel.tp=2 does not divide model.num_attention_heads=3; take one of 1, 3"),
        ("decoder-tiny", 8, ("pp=8",), "parallel.pp=8 (8 stages with schedule '1f1b') is more than "),
        ("decoder-moe-tiny", 3, ("ep=3",), "parallel.ep=3 does not divide model.moe.num_experts=8; take one of 1"),
        ("decoder-tiny", 0, (), "--launch 0: at least 1 process is needed"),
        ("decoder-tiny", 3, (), "data.batch_size=8 "),
    ],
)  # fmt: skip
def test_an_impossible_mesh_is_one_line(
    capsys: pytest.CaptureFixture[str], recipe: str, processes: int, settings: tuple[str, ...], message: str
) -> None:
    given = [flag for setting in settings for flag in ("--set", f"parallel.{setting}")]
    arguments = ["train", str(RECIPES / f"{recipe}.toml"), "--launch", str(processes), *given]
    assert cli._run(arguments) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_processes_share_the_cores_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    class Begun:
        def __init__(self, *_: Any, env: dict[str, str], **named: Any) -> None:
            given.update(env)

        def __enter__(self) -> Begun:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def wait(self) -> int:
            return 0

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))  # of a machine with more
    monkeypatch.setattr(subprocess, "Popen", Begun)
    assert launch(2, RECIPES / "decoder-tiny.toml", [], []) == 0
    assert given["OMP_NUM_THREADS"] == "3"


def test_no_more_processes_are_started_than_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launching, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(subprocess, "Popen", None)
    for flags in ([], ["--resume", "auto"]):
        given = ["train", str(RECIPES / "decoder-tiny.toml"), "--launch", "2000", *flags]
        assert cli._run(given) == ConfigError.exit_code
        said = "error: --launch 2000: so many processes do not fit into this machine's free memory; it has room for 5"
        assert capsys.readouterr().err.startswith(said)


def test_an_output_that_is_there_is_told_once_and_before_processes_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "penjing.json").write_text("{}")
    monkeypatch.setattr(subprocess, "Popen", None)
    given = ["train", str(RECIPES / "decoder-tiny.toml"), "--launch", "2", "--set", f"output={tmp_path}/out"]
    assert cli._run(given) == InputError.exit_code
    assert capsys.readouterr().err.startswith(f"error: output {tmp_path}/out already exists; replace it with --force")
