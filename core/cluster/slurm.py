"""Commands as an array of jobs of Slurm, from a machine that has sbatch.

Slurm places the jobs and begins those of a lost node again, where it is set up to; nothing here schedules. What they
read and write lies in files that every node sees. (https://slurm.schedmd.com/job_array.html)
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field, field_validator

from penjing.core.config import Config
from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text, writing

_LOOK_SECONDS, _ASK_SECONDS = 2.0, 10.0  # between looks at files, and between questions to the cluster
_SILENT_SECONDS = 600.0  # of its controller, which may be begun anew
_TAIL = 300  # characters of a log that are shown


class SlurmSettings(Config):
    """`[slurm]`: tasks run as an array of jobs, on nodes that have penjing installed and see the same files."""

    partition: str | None = Field(default=None, description="Of the jobs; by default the cluster's own.")
    time: str | None = Field(
        default=None, description='How long a job may take, as Slurm writes it, such as "4:00:00"; by default Slurm\'s.'
    )
    cpus: int = Field(default=1, ge=1, description="Processors of a job.")
    memory: str | None = Field(default=None, description='Memory of a job, such as "8G"; by default the cluster\'s.')
    at_once: int | None = Field(default=None, ge=1, description="Jobs that run beside each other at most.")
    most_jobs: int = Field(
        default=1000, ge=1, description="Jobs of an array at most; with more tasks a job does several of them."
    )
    options: tuple[str, ...] = Field(
        default=(), description='Further options of sbatch, such as ["--account=physics", "--qos=low"].'
    )
    setup: str = Field(
        default="", description='Lines of shell before each job, such as "module load python/3.11"; they must succeed.'
    )

    @field_validator("options")
    @classmethod
    def _are_options(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not re.match(r"--?[a-zA-Z]", value):
                raise ValueError(f"{value!r} is no option; give each with its value as one text, such as --qos=low")
            if re.match(r"(--array|-a\b|--parsable|--output|-o\b|--wrap)", value):
                raise ValueError(f"{value!r} is given by penjing itself; leave it out")
        return values


def run_array(
    settings: SlurmSettings, name: str, command: Sequence[str], count: int, folder: Path, look: Callable[[], bool]
) -> str:
    """Run `command` as `count` jobs, each with its number from 0 behind it, and wait for their end.

    Args:
        folder: for the script and what the jobs print, `log_of` each; every node must see it.
        look: called now and then, says whether all is done; what it raises ends the jobs.

    Returns:
        The number of the array. Whether the jobs succeeded is for the caller to see.

    Raises:
        SetupError: there is no sbatch, it refuses, or the cluster says nothing any more.
    """
    if shutil.which("sbatch") is None:
        raise SetupError(
            "[slurm] needs Slurm's command sbatch, which is not here; run on a login node of the cluster, or leave "
            "[slurm] out to run on this machine"
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    script = folder / "job.sh"
    line = f'exec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"'
    atomic_write_text(script, "\n".join(["#!/bin/bash", "set -e", *settings.setup.splitlines(), line, ""]))
    limit = f"%{settings.at_once}" if settings.at_once else ""
    chosen = {"--partition": settings.partition, "--time": settings.time, "--mem": settings.memory}
    asked = [
        "sbatch", "--parsable", f"--job-name={name}", f"--array=0-{count - 1}{limit}",
        f"--cpus-per-task={settings.cpus}", f"--output={folder.absolute()}/%a.log",
        *(f"{option}={value}" for option, value in chosen.items() if value is not None),
        *settings.options, str(script.absolute()),
    ]  # fmt: skip
    sent = subprocess.run(asked, capture_output=True, text=True, check=False)
    job = sent.stdout.strip().partition(";")[0]  # NUMBER, or NUMBER;CLUSTER
    if sent.returncode or not job.isdigit():
        said = (sent.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        raise SetupError(f"sbatch refuses the jobs: {said}. Look at [slurm]; what is done is kept")
    try:
        _wait(job, look)
    except BaseException:
        subprocess.run(["scancel", job], check=False, capture_output=True)
        raise
    return job


def _wait(job: str, look: Callable[[], bool]) -> None:
    # sbatch --wait would do, but it keeps the job's number in its buffer until the end, so that nothing can be ended
    asked = heard = time.monotonic()
    while not look():
        time.sleep(_LOOK_SECONDS)
        if time.monotonic() - asked < _ASK_SECONDS:
            continue
        asked = time.monotonic()
        said = subprocess.run(
            ["squeue", "--noheader", "--format=%i", f"--jobs={job}"], capture_output=True, text=True, check=False
        )
        if "Invalid job id" in said.stderr or (said.returncode == 0 and not said.stdout.strip()):
            return  # it is over
        if said.returncode == 0:
            heard = asked
        elif asked - heard > _SILENT_SECONDS:
            reason = (said.stderr.strip().splitlines() or ["no reason is given"])[-1]
            raise SetupError(
                f"squeue has not answered for {asked - heard:.0f} seconds ({reason}), and the array {job} is ended. "
                "What is done is kept; the same command goes on"
            )


def log_of(folder: Path, number: int) -> str:
    """Where a job of an array printed, and how that ends."""
    path = folder / f"{number}.log"
    try:
        tail = path.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:]
    except OSError:
        return f"{path} was not written"
    return f"{path} ends with: {tail}" if tail else f"{path} is empty"
