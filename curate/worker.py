"""A process that does tasks of a text corpus.

Started by name, so that no caller's main module is imported again, and watched by `workers.py`, which hears of its
death: a killed child of datatrove's local executor leaves the run waiting for ever.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from penjing.curate.plan import load_plan
from penjing.curate.task import run_task
from penjing.curate.workers import answer_tasks

if __name__ == "__main__":
    answer_tasks(partial(run_task, load_plan(Path(sys.argv[1]))))
