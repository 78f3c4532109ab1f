"""Tasks of a plan on a Ray cluster: what `workers.py` does on one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penjing.core.cluster.ray_cluster import RayCluster, RaySettings
from penjing.curate.elsewhere import run_task_here
from penjing.curate.plan import load_plan


def run_tasks_on_ray(
    plan_file: Path, stage: int, tasks: list[int], settings: RaySettings, done: Callable[[int], None]
) -> None:
    """Do `tasks` of a stage on a cluster. Those of a lost node are done again; each leaves its folder or nothing.

    Args:
        done: called with each task that is complete, from this thread.

    Raises:
        PenjingError: the first error of a task. Tasks that are complete stay so; the others are ended.
    """
    cluster = RayCluster(settings, run_task_here, plan_file.parent)
    key = load_plan(plan_file).stages[stage].folder.name
    for task, _ in cluster.results({task: (str(plan_file), key, stage, task) for task in tasks}):
        done(task)
