"""Arrays of jobs of a stand-in for Slurm: what sbatch is asked, refusals, ends, and a controller that is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.core.cluster import slurm
from penjing.core.cluster.slurm import SlurmSettings, log_of, run_array
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, SetupError
from tests.core.cluster.fake_slurm import fake_slurm


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_LOOK_SECONDS", "_ASK_SECONDS"):
        monkeypatch.setattr(slurm, name, 0.01)
    return fake_slurm(tmp_path, monkeypatch)


def test_a_command_runs_once_for_each_number(tmp_path: Path, home: Path) -> None:
    settings = SlurmSettings(
        partition="low",
        time="1:00:00",
        cpus=3,
        memory="2G",
        at_once=2,
        options=("--qos=x",),
        setup="A=1\nexport B=$A$A",
    )
    job = run_array(
        settings, "name", ["bash", "-c", "echo $0 of $B in $(pwd)", "a b"], 3, tmp_path / "s", lambda: False
    )
    assert job == "7"
    assert log_of(tmp_path / "s", 2).endswith(f"ends with: a b of 11 in {Path.cwd()}")
    assert json.loads((home / "asked.json").read_text()) == [
        "--parsable", "--job-name=name", "--array=0-2%2", "--cpus-per-task=3", f"--output={tmp_path}/s/%a.log",
        "--partition=low", "--time=1:00:00", "--mem=2G", "--qos=x", f"{tmp_path}/s/job.sh",
    ]  # fmt: skip
    assert not (home / "cancelled").exists()
    assert "was not written" in log_of(tmp_path / "s", 9)


def test_what_was_asked_for_is_refused_or_missing(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_REFUSES", "gpu")
    with pytest.raises(SetupError, match=r"sbatch refuses the jobs: .*invalid partition specified: gpu\. Look at"):
        run_array(SlurmSettings(partition="gpu"), "n", ["true"], 1, tmp_path / "s", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SetupError, match="sbatch, which is not here; run on a login node"):
        run_array(SlurmSettings(), "n", ["true"], 1, tmp_path / "s", lambda: False)


def test_an_error_ends_the_jobs(tmp_path: Path, home: Path) -> None:
    def look() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_array(SlurmSettings(), "n", ["sleep", "100"], 1, tmp_path / "s", look)
    assert (home / "cancelled").read_text() == "7"


def test_a_controller_that_is_silent_is_waited_for_and_then_told_of(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = (home / "squeue").read_text()
    down = "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    (home / "squeue").write_text(down)
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        if len(looks) == 5:
            (home / "squeue").write_text(queue)
        return False

    run_array(SlurmSettings(), "n", ["true"], 1, tmp_path / "s", look)
    assert len(looks) >= 5
    (home / "squeue").write_text(down)
    monkeypatch.setattr(slurm, "_SILENT_SECONDS", 0.05)
    with pytest.raises(SetupError, match=r"squeue has not answered for .*Unable to contact slurm controller"):
        run_array(SlurmSettings(), "n", ["sleep", "100"], 1, tmp_path / "s", lambda: False)
    assert (home / "cancelled").exists()


def test_an_array_that_is_forgotten_is_over(tmp_path: Path, home: Path) -> None:
    (home / "7.gone").touch()
    assert run_array(SlurmSettings(), "n", ["true"], 1, tmp_path / "s", lambda: False) == "7"


@pytest.mark.parametrize("option", ["--array=0-9", "-o x", "--parsable", "qos=low", "; rm -rf /"])
def test_options_that_are_none_or_ours(option: str) -> None:
    with pytest.raises(ConfigError, match=r"is no option|is given by penjing itself"):
        parse_config(SlurmSettings, {"options": [option]}, "slurm")
