"""How a front's process is kept where the machine refuses it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penjing.serve.gate.config import FrontConfig, FrontJob
from penjing.serve.site.process import FrontProcess
from tests.serve.triton.serving import free_ports, wait_until


@pytest.mark.parametrize(
    ("where", "name", "number"), [(subprocess, "Popen", errno.EAGAIN), (os, "pipe", errno.EMFILE)], ids=["fork", "pipe"]
)
def test_a_machine_without_room_for_processes_ends_nobody(
    where: Any, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the supervisor, and so the model, which went on answering."""
    job = FrontJob(front=FrontConfig(port=free_ports(1)[0]), models=(), log=tmp_path / "front.log")
    front = FrontProcess(job, tmp_path / "log")
    try:
        os.kill(front.pid, signal.SIGKILL)
        said: list[str] = []

        def keep() -> bool:
            if (line := front.keep()) is not None:
                said.append(line)
            return bool(line)

        wait_until(keep, 30, "the sight of its end")
        with monkeypatch.context() as patch:

            def refuse(*_: Any, **__: Any) -> None:
                raise OSError(number, os.strerror(number))

            patch.setattr(where, name, refuse)
            descriptors = len(os.listdir("/proc/self/fd"))
            assert keep()
            assert len(os.listdir("/proc/self/fd")) == descriptors
        assert said == [
            "the HTTP front ended unexpectedly (exit code -9)",
            f"the HTTP front cannot be started: [Errno {number}] {os.strerror(number)}",
        ]
        assert front.pid == 0
        wait_until(lambda: front.keep() is None and front.pid, 30, "the next start")
    finally:
        front.end()
