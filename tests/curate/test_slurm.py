"""Tasks as jobs of a stand-in for Slurm: the corpus of a local run, and what is said of jobs that fail or vanish."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.core.cluster import slurm
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.curate import slurm_tasks
from penjing.curate.run import curate_recipe
from tests.core.cluster.fake_slurm import fake_slurm
from tests.curate.corpus import kept, recipe, sources

pytest.importorskip("pyarrow")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_LOOK_SECONDS", "_ASK_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.05)
    monkeypatch.setattr(slurm_tasks, "_LATE_SECONDS", 0.0)
    return fake_slurm(tmp_path, monkeypatch)


def test_the_corpus_is_that_of_a_local_run_also_after_jobs_that_vanish(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sources(tmp_path / "in")
    here = kept(recipe(tmp_path / "here", path, steps=[{"kind": "clean"}]))
    there = recipe(tmp_path / "there", path, steps=[{"kind": "clean"}], task_mb=0.03, slurm={"most_jobs": 2})
    monkeypatch.setenv("SLURM_LOSES", "1")
    with pytest.raises(
        SetupError, match=r"tasks of Slurm's array 7 left no result, the first is 1: .*1.log was not wr"
    ):
        curate_recipe(there, "test")
    done = {each.name for each in there.work_folder.glob("stage-0-*/task-*")}
    assert "task-00000" in done
    assert "task-00001" not in done
    monkeypatch.delenv("SLURM_LOSES")
    assert kept(there) == here


def test_an_error_of_a_job_is_the_users(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sources(tmp_path / "in")
    made = recipe(tmp_path, path, steps=[], slurm={"setup": f"rm -rf {path}"})
    with pytest.raises(InputError, match="was changed or removed while the sources were read; run again"):
        curate_recipe(made, "test")
    monkeypatch.setattr(slurm_tasks, "failure", lambda *_: AssertionError("of the run before"))
    path = sources(tmp_path / "in")
    made = recipe(tmp_path, path, steps=[], slurm={"setup": "echo no such module >&2; false"})
    with pytest.raises(SetupError, match=r"left no result, the first is 0: .*0.log ends with: no such module"):
        curate_recipe(made, "test")


def test_one_cluster_at_a_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leave one of \[ray\] and \[slurm\] out"):
        recipe(tmp_path, tmp_path, ray={}, slurm={})
