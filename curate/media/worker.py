"""A process that does tasks of `penjing curate media`."""

from __future__ import annotations

import sys
from pathlib import Path

from penjing.curate.media.tasks import load_media_plan, run_media_task
from penjing.curate.workers import answer_tasks

if __name__ == "__main__":
    plan = load_media_plan(Path(sys.argv[1]))
    answer_tasks(lambda _, task: run_media_task(plan, task))
