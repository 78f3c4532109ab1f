"""A machine without room for one more process is an error with words, whatever was to be started."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import SetupError
from penjing.curate.workers import run_tasks
from penjing.train.align.user_reward import UserReward
from penjing.train.launch.ray_nodes import Machine
from penjing.train.launch.tied import TiedTorchrun
from penjing.train.search.trial import Trials

REFUSED = "no process can be started: [Errno 11] Resource temporarily unavailable; end other programs and run again"
STARTS: dict[str, Callable[[Path], object]] = {
    "a worker of curation": lambda folder: run_tasks(folder / "plan", 0, [0, 1], 2, print),
    "a reward": lambda _: UserReward("reward.py:one", timeout=1.0),
    "torchrun": lambda folder: TiedTorchrun([], folder),
    "a trial": lambda folder: Trials(1).run(folder / "recipe.toml", [], 1, folder),
}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.usefixtures("full")
def test_no_room_for_a_process_is_an_error_with_words(name: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError) as refused:
        STARTS[name](tmp_path)
    assert str(refused.value) == REFUSED


def test_any_other_refusal_is_one_too(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no process can be started: \[Errno 2\].*nowhere'\)$"):
        TiedTorchrun([], tmp_path / "nowhere")


@pytest.mark.usefixtures("full")
def test_a_machine_of_ray_says_so(tmp_path: Path) -> None:
    assert Machine().start([], str(tmp_path)) == REFUSED
