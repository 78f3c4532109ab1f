"""A task on another machine: done by the plan that is read there, if that machine keeps what this one would."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from penjing.curate.plan import Plan, load_plan
from penjing.curate.task import run_task


def run_task_here(plan_file: str, key: str, stage: int, task: int) -> None:
    """Do a task.

    Args:
        key: the name of its stage's folder, so that another plan of the same name is read anew.

    Raises:
        SetupError: another version of penjing, or of what decides what is kept, is installed here.
        PenjingError: see `run_task`.
    """
    run_task(_plan(plan_file, key), stage, task)


@lru_cache(maxsize=1)
def _plan(plan_file: str, key: str) -> Plan:
    """The plan, once in a process."""
    plan = load_plan(Path(plan_file))
    plan.check_code()
    return plan
