"""Tasks on several processes of this machine: one that dies is replaced and its task done again, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from penjing.core.cluster.answers import answer_of, failure, output_for_answers
from penjing.core.cluster.start import room_for_process
from penjing.core.errors import SetupError

_TRIES = 2
_PYTHON, _TEXT = (sys.executable, "-m"), "penjing.curate.worker"


def run_tasks(
    plan_file: Path, stage: int, tasks: list[int], workers: int, done: Callable[[int], None], module: str = _TEXT
) -> None:
    """Do `tasks` of a stage on `workers` processes.

    Args:
        module: what a process runs, with `plan_file` as its argument; it calls `answer_tasks`.
        done: called with each task that is complete, from this thread.

    Raises:
        PenjingError: the first error of a task, a process that was killed twice by the same one, or no room for a
            process. Tasks that are complete stay so; the others are ended.
    """
    events: SimpleQueue[tuple[int, dict[str, Any] | None]] = SimpleQueue()  # (place of the worker, answer or None)
    running: dict[int, tuple[_Worker, int]] = {}
    waiting, tries = list(reversed(tasks)), dict.fromkeys(tasks, 0)
    left = len(tasks)
    command = [*_PYTHON, module, str(plan_file)]

    def start(place: int, worker: _Worker) -> None:
        if waiting:
            task = waiting.pop()
            tries[task] += 1
            running[place] = worker, task
            worker.ask(stage, task)
        else:
            worker.close()

    try:
        for place in range(min(workers, len(tasks))):
            start(place, _Worker(command, place, events))
        while left:
            place, answer = events.get()
            if place not in running:
                continue  # it was told to end, and did
            worker, task = running.pop(place)
            if answer is None:
                if tries[task] >= _TRIES:
                    raise SetupError(
                        f"task {task} ended its process twice ({worker.ending()}): what it reads may need more "
                        "memory than there is. Finished tasks are kept; lower workers or task_mb, and run again"
                    )
                waiting.append(task)
                start(place, _Worker(command, place, events))
            elif "error" in answer:
                raise failure(int(answer["code"]), answer["error"])
            else:
                left -= 1
                done(task)
                start(place, worker)
    finally:
        for worker, _ in running.values():
            worker.kill()


def answer_tasks(work: Callable[[int, int], None]) -> NoReturn:
    """What a process of `run_tasks` does: it reads "STAGE TASK" lines, calls `work` and answers with a line of JSON.

    It ends with its caller, in the midst of a task: else it would go on beside the run that takes up its work.
    """
    tasks: SimpleQueue[tuple[int, int]] = SimpleQueue()
    threading.Thread(target=_hear, args=(tasks,), daemon=True).start()
    answers = output_for_answers()
    print(file=answers, flush=True)  # ends a line that a library has begun while it was imported
    while True:
        stage, task = tasks.get()
        answer = {"task": task} | answer_of(partial(work, stage, task))
        print(json.dumps(answer), file=answers, flush=True)


def _hear(tasks: SimpleQueue[tuple[int, int]]) -> None:
    for line in sys.stdin:
        stage, task = map(int, line.split())
        tasks.put((stage, task))
    os._exit(0)  # the caller has no more tasks, or is gone; what it asks for is written by then


class _Worker:
    """A process, and a thread that hears its answers and its end."""

    def __init__(self, command: list[str], place: int, events: SimpleQueue[tuple[int, dict[str, Any] | None]]) -> None:
        with room_for_process():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._place, self._events = place, events
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, stage: int, task: int) -> None:
        """Give it a task; a process that is gone is heard of by its end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{stage} {task}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()

    def ending(self) -> str:
        """How it ended."""
        code = self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"task": '):
                self._events.put((self._place, json.loads(line)))
            elif line.strip():  # printed while its imports ran, before its output was kept for answers
                sys.stderr.write(line)
        self._process.wait()
        self._events.put((self._place, None))
