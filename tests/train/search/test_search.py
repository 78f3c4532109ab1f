"""Whole searches of tiny runs: the winner is a run like any other, and nothing that was measured is lost."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.train.run import train
from penjing.train.search import trial
from penjing.train.search.search import run_search
from penjing.train.search.state import SearchState, read_search
from penjing.train.search.trial import Outcome, Trials
from tests.forking import Forked
from tests.train.conftest import RECIPE

PEAKS = (1e-3, 1e-2, 1e18)
"""The last one makes a loss that is no number, which ends that trial alone."""


@pytest.fixture
def search_recipe(shards: Path, tmp_path: Path) -> Path:
    base = RECIPE.format(folder=tmp_path, shards=shards) + "\n[learning_rate]\npeak = 1e-3\n"
    (tmp_path / "base.toml").write_text(base)
    path = tmp_path / "search.toml"
    path.write_text(
        f'base = "{tmp_path}/base.toml"\noutput = "{tmp_path}/search"\ntrials = 3\nfirst = 2\nfactor = 3\n'
        'sampler = "grid"\n\n[settings]\n"monitor.every" = 4\n\n'
        f'[space]\n"learning_rate.peak" = {{ values = {list(PEAKS)} }}\n'
    )
    return path


def test_a_search_that_was_killed_goes_on_and_its_winner_is_a_run_like_any_other(
    search_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "search/search.json"
    command = [sys.executable, "-m", "penjing.train", "search", str(search_recipe)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (file.exists() and any(trial.evaluations for trial in read_search(file).trials)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = read_search(file)
    # The trials of the search that was killed were new processes, and these need not be.
    forked = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(trial, "subprocess", forked)

    state = run_search(search_recipe)
    assert state.winner is not None
    assert state.rungs == [(2, 3), (8, 1)]
    assert [trial.settings["learning_rate.peak"] for trial in state.trials] == list(PEAKS)
    assert state.trials[0].evaluations[2] == kept.trials[0].evaluations[2]
    values = [trial.value(2, "loss") for trial in state.trials]
    assert state.winner == values.index(min(values))
    assert values[2] == math.inf
    assert [8 in trial.evaluations for trial in state.trials] == [number == state.winner for number in range(3)]
    best = state.trials[state.winner]

    # The search's best.toml, run as an ordinary recipe from the beginning, gives the trial's bits.
    results = train(tmp_path / "search/best.toml", [f"output={tmp_path}/again"])
    assert results == best.evaluations[8]
    weights = (tmp_path / "again/model.safetensors").read_bytes()
    folder = tmp_path / f"search/trials/{state.winner}"
    assert (folder / "checkpoint/model.safetensors").read_bytes() == weights
    lost = 1 - state.winner
    assert not (tmp_path / f"search/trials/{lost}/run/checkpoints").exists()
    assert (tmp_path / f"search/trials/{lost}/run/metrics.jsonl").exists()
    page = (tmp_path / "search/report.html").read_text()
    assert "<svg" in page
    assert f"{best.value(8, 'loss'):.4f}" in page
    before = file.read_bytes()
    run_search(search_recipe)  # all is there: no process is started, nothing changes
    assert file.read_bytes() == before


def test_trials_that_run_at_a_time_are_drawn_before_the_others_are_measured(
    search_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=60)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))  # of a machine with more

    def measured(self: Trials, recipe: Path, overrides: list[str], until: int, folder: Path) -> Outcome:
        assert self._threads == 3
        if until == 2 and folder.name != "2":
            together.wait()  # of the three, two at a time
        return Outcome({"loss": float(folder.name)})

    monkeypatch.setattr(Trials, "run", measured)
    for sampler in ("grid", "tpe"):
        state = run_search(search_recipe, ["workers=2", f"sampler={sampler}"], force=True)
        assert (state.winner, len(state.trials)) == (0, 3)


def states(search_recipe: Path, *overrides: str) -> SearchState:
    return run_search(search_recipe, list(overrides))


def test_bad_searches_are_refused_before_a_trial_runs(search_recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate.peak = 0.5 of .*base.toml is not in"):
        states(search_recipe, 'settings."learning_rate.peak"=0.5')
    with pytest.raises(ConfigError, match="first = 8 steps is the whole run of 8"):
        states(search_recipe, "first=8")
    with pytest.raises(ConfigError, match=r"needs steps, not epochs, and evaluation.every above 0"):
        states(search_recipe, 'settings."evaluation.every"=0')
    with pytest.raises(ConfigError, match=r"unknown key 'learning_rate\.top'"):
        states(search_recipe, 'settings."learning_rate.top"=1.0')
    with pytest.raises(ConfigError, match=r"recipe nothing does not exist"):
        states(search_recipe, "base=nothing")
    with pytest.raises(ConfigError, match=r"search.toml is a recipe of 'penjing train search', not of 'penjing train'"):
        train(search_recipe)
    with pytest.raises(ConfigError, match=r"base.toml is a recipe of 'penjing train', not of 'penjing train search'"):
        run_search(tmp_path / "base.toml")
    assert not (tmp_path / "search").exists()
    (tmp_path / "search").mkdir()
    (tmp_path / "search/thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError, match=r"holds thesis.txt, which is no part of a search"):
            run_search(search_recipe, force=force)
    assert (tmp_path / "search/thesis.txt").read_text() == "mine"


def test_another_search_is_not_continued(search_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    kept = {"schema_version": 1, "key": "other", "base": "x", "metric": "loss", "goal": "lowest", "rungs": [[1, 2]]}
    (tmp_path / "search/search.json").write_text(json.dumps(kept))
    begun = tmp_path / "search/.search.json.partial-1-0"  # by a process that was killed
    begun.write_text("{")
    with pytest.raises(InputError, match="a search with another recipe; start this one with --force"):
        run_search(search_recipe)
    assert not begun.exists()
    (tmp_path / "search/search.json").write_text("{")
    with pytest.raises(InputError, match=r"search.json"):
        run_search(search_recipe)


def test_one_process_a_search(search_recipe: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "search").mkdir()
    lock = os.open(tmp_path / "search", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with pytest.raises(SetupError, match="another process works on the search"):
            run_search(search_recipe)
    finally:
        os.close(lock)
