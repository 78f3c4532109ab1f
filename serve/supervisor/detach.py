"""A supervisor in the background."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penjing.core.cluster.start import room_for_process
from penjing.core.cluster.tied import end_with
from penjing.core.errors import ServerError
from penjing.core.files import atomic_write_text, writing
from penjing.core.progress import Progress
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig

POLL_SECONDS = 0.05
READY = "ready"


def detach_supervisor(
    model: Path, config: ServeConfig, engine_json: str, progress: Progress, *, tied: bool = False
) -> None:
    """Start a supervisor in the background and return when its server is ready.

    Args:
        tied: it drains and ends when the calling thread does, however that ends.

    Raises:
        SetupError: the disk is full, or the machine has no room for another process.
        ServerError: it ended; with what it said.
    """
    command = supervisor_command(model, config, engine_json)
    progress.start(f"loading {model.name}", 1)
    port = config.grpc_port

    def is_ready(pid: int) -> bool:
        found = state.read_state(port)
        return found is not None and found.supervisor_pid == pid and found.state == READY

    start_behind(command, state.errors_path(port), is_ready, "the supervisor ended without a word", tied=tied)
    progress.advance()
    flag = "" if port == 8001 else f" --grpc-port {port}"
    progress.note(f"{model.name} is ready: {config.endpoints}; end it with 'penjing stop{flag}'")


def supervisor_command(model: Path, config: ServeConfig, engine_json: str) -> list[str]:
    """What keeps a Triton server for `model`."""
    settings = [str(model), config.model_dump_json(), engine_json]
    return [sys.executable, "-m", "penjing.serve.supervisor.supervisor", *settings]


def start_apart(command: list[str], errors: Path, number: int | None) -> subprocess.Popen[bytes]:
    """Run `command` in a session of its own; what it says goes into the file `errors`, for its user alone. It gets the
    signal `number`, if there is one, when the calling thread ends.

    Raises:
        SetupError: the disk is full, or the machine has no room for another process.
    """
    with writing(errors):
        errors.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stderr, room_for_process():
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=None if number is None else partial(end_with, os.getpid(), number),
            )


def start_behind(
    command: list[str], errors: Path, is_ready: Callable[[int], bool], silent: str, *, tied: bool = False
) -> None:
    """Run `command` in the background and return when it is ready.

    Args:
        errors: the file for what it says.
        is_ready: asked with its process number, again and again.
        silent: what is told of one that ended and said nothing.
        tied: it gets SIGTERM when the calling thread ends, however that happens.

    Raises:
        SetupError: the disk is full, or the machine has no room for another process.
        ServerError: it ended; with what it said.
    """
    process = start_apart(command, errors, signal.SIGTERM if tied else None)
    try:
        while not is_ready(process.pid):
            if process.poll() is not None:
                reason = errors.read_text(encoding="utf-8", errors="replace").strip()
                if not reason:  # a full disk takes no last words: then it is what is told
                    atomic_write_text(errors, f"{silent}\n", 0o600)
                raise ServerError(reason.removeprefix("error: ") or silent)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
        raise
