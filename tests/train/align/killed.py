"""Runs of a recipe that kill themselves in one phase each, and are resumed; run by test_killed.py.

    python -m tests.train.align.killed RECIPE FOLDER SETTING …

One process makes the first run, and forks the others. FOLDER/whole-run is of a run that was left alone, and
FOLDER/PHASE-run of one that was killed and resumed.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penjing.serve.engine.engine import LLMEngine
from penjing.train.align.rollouts import RolloutStream
from penjing.train.families import rollouts
from penjing.train.families.rollouts import RolloutTuning
from penjing.train.objective.policy import PolicyGradient
from penjing.train.run import train
from penjing.train.state import checkpoint


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in(owner: Any, name: str, call: int) -> Callable[[], None]:
    """Makes the process end before the so-and-so-many-th call."""

    def patch() -> None:
        real, calls = getattr(owner, name), [0]

        def counted(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                _die()
            return real(*arguments, **named)

        setattr(owner, name, counted)

    return patch


def dies_half_written() -> None:
    """Ends the process when half of a checkpoint's tensors are on disk."""
    real, calls = checkpoint.save_tensors, [0]

    def halved(tensors: Any, path: Path) -> Any:
        calls[0] += 1
        written = real(tensors, path)
        if calls[0] == 3:
            os.truncate(path, path.stat().st_size // 2)
            _die()
        return written

    checkpoint.save_tensors = halved


PHASES: dict[str, Callable[[], None]] = {
    "sampling": dies_in(LLMEngine, "step", 10),
    "rewarding": dies_in(RolloutStream, "_judge", 6),
    "learning": dies_in(PolicyGradient, "__call__", 4),
    "evaluation": dies_in(RolloutTuning, "_keep", 5),
    "checkpoint": dies_half_written,
}


def forked(work: Callable[[], object]) -> int:
    """The status with which a child ends that does `work`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(recipe: Path, folder: Path, settings: list[str]) -> None:
    """Make all runs."""

    def run(name: str, **how: str) -> None:
        train(recipe, [*settings, f"output={folder}/{name}"], **how)  # type: ignore[arg-type]

    rollouts.write_rollout_page = lambda *_: None  # drawing takes longer than learning
    run("whole")  # imports what the forked ones need
    for name, patch in PHASES.items():
        assert forked(lambda name=name, patch=patch: (patch(), run(name))) == -signal.SIGKILL, name
        assert not (folder / name).exists(), name
        assert forked(lambda name=name: run(name, resume="auto")) == 0, name


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
