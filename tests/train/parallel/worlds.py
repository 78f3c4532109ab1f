"""Spawned gloo worlds that run a list of cases each: one start for many comparisons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.forking import Forked

SCRIPT = Path(__file__).with_name("matrix.py")


def run_world(
    folder: Path,
    size: int,
    cases: dict[str, Any],
    timeout_s: float = 240.0,
    script: Path = SCRIPT,
    new: bool = False,
) -> dict[str, Any]:
    """Results of `cases` by name, from `size` processes of `script`; their output is raised when one fails.

    Args:
        new: they are interpreters of their own, and not forked from one that has imported torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    logs = [open(folder / f"log-{rank}", "w") for rank in range(size)]  # noqa: SIM115
    start = subprocess.Popen if new else Forked
    processes = [
        start(
            [sys.executable, script, folder], stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "FOLDER": str(folder)},
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() not in (None, 0) for process in processes)
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for log in logs:
            log.close()
    results = folder / "results.json"
    if not results.exists():
        raise AssertionError("\n".join((folder / f"log-{rank}").read_text()[-3000:] for rank in range(size)))
    return json.loads(results.read_text())
