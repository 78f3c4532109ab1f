"""A supervisor in the background."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from penjing.core.errors import ServerError
from penjing.core.files import writing
from penjing.core.progress import Progress
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import ServeConfig

POLL_SECONDS = 0.05
READY = "ready"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def detach_supervisor(
    model: Path, config: ServeConfig, engine_json: str, progress: Progress, *, tied: bool = False
) -> None:
    """Start a supervisor in the background and return when its server is ready.

    Args:
        tied: it drains and ends when the calling thread does, however that ends.

    Raises:
        SetupError: the disk is full.
        ServerError: it ended; with what it said.
    """
    command = [
        sys.executable,
        "-m",
        "penjing.serve.supervisor.supervisor",
        str(model),
        config.model_dump_json(),
        engine_json,
    ]
    progress.start(f"loading {model.name}", 1)
    port = config.grpc_port
    errors = state.errors_path(port)
    caller = os.getpid()

    def end_with_caller() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != caller:
            os._exit(1)

    with writing(errors):
        errors.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=end_with_caller if tied else None,
            )
    try:
        while True:
            found = state.read_state(port)
            if found is not None and found.supervisor_pid == process.pid and found.state == READY:
                break
            if process.poll() is not None:
                reason = errors.read_text(encoding="utf-8", errors="replace").strip()
                raise ServerError(reason.removeprefix("error: ") or "the supervisor ended without a word")
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
        raise
    progress.advance()
    flag = "" if port == 8001 else f" --grpc-port {port}"
    progress.note(f"{model.name} is ready: {config.endpoints}; end it with 'penjing stop{flag}'")
