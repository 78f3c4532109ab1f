"""Tasks of a plan on a Ray cluster: what `workers.py` does on one machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from penjing.core.cluster.ray_cluster import RayCluster, RaySettings
from penjing.curate.plan import Plan, load_plan
from penjing.curate.task import run_task


def run_tasks_on_ray(
    plan_file: Path, stage: int, tasks: list[int], settings: RaySettings, done: Callable[[int], None]
) -> None:
    """Do `tasks` of a stage on a cluster. Those of a lost node are done again; each leaves its folder or nothing.

    Args:
        done: called with each task that is complete, from this thread.

    Raises:
        PenjingError: the first error of a task. Tasks that are complete stay so; the others are ended.
    """
    cluster = RayCluster(settings, _task, plan_file.parent)
    key = load_plan(plan_file).stages[stage].folder.name
    for task, _ in cluster.results({task: (str(plan_file), key, stage, task) for task in tasks}):
        done(task)


def _task(plan_file: str, key: str, stage: int, task: int) -> None:
    run_task(_plan(plan_file, key), stage, task)


@lru_cache(maxsize=1)
def _plan(plan_file: str, key: str) -> Plan:
    """The plan, once in a process; `key` names a stage of it, so that another plan of the same name is read anew.

    Raises:
        SetupError: another version of penjing, or of what decides what is kept, is installed here.
    """
    plan = load_plan(Path(plan_file))
    plan.check_code()
    return plan
