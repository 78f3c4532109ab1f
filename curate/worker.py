"""A process that does tasks: it reads "STAGE TASK" lines and answers each with a line of JSON.

Started by name, so that no caller's main module is imported again, and watched by `workers.py`, which hears of its
death: a killed child of datatrove's local executor leaves the run waiting for ever. It ends with its caller too, in the
midst of a task: else it would go on beside the run that takes up its work.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from penjing.core.cluster.answers import answer_of
from penjing.curate.plan import load_plan
from penjing.curate.task import run_task


def main() -> None:
    """Work until the input ends."""
    tasks: SimpleQueue[tuple[int, int]] = SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    plan = load_plan(Path(sys.argv[1]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    while True:
        stage, task = tasks.get()
        answer = {"task": task} | answer_of(partial(run_task, plan, stage, task))
        print(json.dumps(answer), file=answers, flush=True)


def _listen(tasks: SimpleQueue[tuple[int, int]]) -> None:
    for line in sys.stdin:
        stage, task = map(int, line.split())
        tasks.put((stage, task))
    os._exit(0)  # the caller has no more tasks, or is gone; what it asks for is written by then


if __name__ == "__main__":
    main()
