"""Tasks of a plan as an array of Slurm's jobs: what `workers.py` does on one machine.

    python -m penjing.curate.slurm_tasks FOLDER NUMBER

is a job: it does every COUNTth task from NUMBER on, as FOLDER/tasks.json says, and leaves an error as FOLDER/TASK.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penjing.core.cluster.answers import answer_of, failure
from penjing.core.cluster.slurm import SlurmSettings, log_of, run_array
from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text, writing
from penjing.core.manifest import read_json_object
from penjing.curate.elsewhere import run_task_here
from penjing.curate.plan import load_plan
from penjing.curate.task import task_folder

_TASKS = "tasks.json"
_LATE_SECONDS = 10.0  # until a file that another node wrote is seen here


def run_tasks_on_slurm(
    plan_file: Path, number: int, tasks: list[int], settings: SlurmSettings, done: Callable[[int], None]
) -> None:
    """Do `tasks` of a stage on a cluster.

    Args:
        done: called with each task that is complete, from this thread.

    Raises:
        PenjingError: the first error of a task, or one that left neither a result nor an error. Tasks that are complete
            stay so; the others are ended.
    """
    stage = load_plan(plan_file).stages[number]
    folder = plan_file.parent.absolute() / f"slurm-{number}"
    count = min(len(tasks), settings.most_jobs)
    with writing(folder):
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
    facts = {
        "plan": str(plan_file.absolute()),
        "key": stage.folder.name,
        "stage": number,
        "tasks": tasks,
        "jobs": count,
    }
    atomic_write_text(folder / _TASKS, json.dumps(facts))
    left = list(tasks)

    def look() -> bool:
        for task in list(left):
            if task_folder(stage, task).exists():
                left.remove(task)
                done(task)
            elif (folder / f"task-{task}.json").exists():
                answer = read_json_object(folder / f"task-{task}.json")
                raise failure(int(answer["code"]), answer["error"])
        return not left

    command = [sys.executable, "-m", "penjing.curate.slurm_tasks", str(folder)]
    job = run_array(settings, f"penjing-{plan_file.parent.name}-{number}", command, count, folder, look)
    until = time.monotonic() + _LATE_SECONDS
    while not look() and time.monotonic() < until:
        time.sleep(0.1)
    if left:
        raise SetupError(
            f"{len(left)} of {len(tasks)} tasks of Slurm's array {job} left no result, the first is {left[0]}: "
            f"{log_of(folder, tasks.index(left[0]) % count)}. What is done is kept; it may need more memory or time "
            "([slurm] memory, time), and the same command goes on"
        )


def main() -> None:
    """A job."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    facts = read_json_object(folder / _TASKS)
    for task in facts["tasks"][number :: facts["jobs"]]:
        answer = answer_of(partial(run_task_here, facts["plan"], facts["key"], facts["stage"], task))
        if "error" in answer:
            atomic_write_text(folder / f"task-{task}.json", json.dumps(answer))
            sys.exit(f"task {task}: {answer['error']}")


if __name__ == "__main__":
    main()
