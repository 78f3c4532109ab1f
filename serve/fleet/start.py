"""`penjing serve NAME=FOLDER …`: what can be refused is refused here, before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from penjing.core.errors import ServerError
from penjing.core.files import writing
from penjing.core.progress import Progress, progress_bar
from penjing.serve.fleet.fleet import Fleet
from penjing.serve.fleet.member import READY
from penjing.serve.fleet.plan import FleetPlan
from penjing.serve.fleet.state import read_fleet
from penjing.serve.site.process import check_front
from penjing.serve.supervisor import state
from penjing.serve.supervisor.install import install
from penjing.serve.supervisor.process import check_ports

POLL_SECONDS = 0.05


def serve_fleet(plan: FleetPlan, *, detach: bool = False) -> None:
    """Serve all models of `plan`; returns when they were told to stop, or with `detach` when they are ready.

    Raises:
        ConfigError: two equal ports.
        SetupError: a port is in use, the machine cannot run Triton server or front, another supervisor has a port.
        ServerError: a model could not be loaded; the message has its name and its log's end.
    """
    for model in plan.models:
        if state.is_running(model.config.grpc_port):
            with state.owning(model.config.grpc_port):  # raises, with the right words
                pass
    if plan.front is not None:
        check_front(plan.front)
    for index, model in enumerate(plan.models):
        check_ports(model.config if index else model.config.model_copy(update={"front": plan.front}))
    with progress_bar() as progress:
        install(progress)
        if detach:
            _detach(plan, progress)
        else:
            Fleet(plan, progress).run()


def _detach(plan: FleetPlan, progress: Progress) -> None:
    command = [sys.executable, "-m", "penjing.serve.fleet.fleet", plan.model_dump_json()]
    progress.start(f"loading {plan.names}", 1)
    errors = _errors_path(plan.port)
    with writing(errors):
        errors.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, start_new_session=True
            )
    try:
        while True:
            found = read_fleet(plan.port)
            if found is not None and found.pid == process.pid and found.state == READY:
                break
            if process.poll() is not None:
                reason = errors.read_text(encoding="utf-8", errors="replace").strip()
                raise ServerError(reason.removeprefix("error: ") or "the process that keeps the models ended")
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
        raise
    progress.advance()
    flag = "" if plan.port == 8001 else f" --grpc-port {plan.port}"
    progress.note(f"{plan.names}: ready. {plan.endpoints}; end them with 'penjing stop{flag}'")


def _errors_path(port: int) -> Path:
    """What the process in the background says."""
    return state.run_folder() / f"{port}.fleet.log"
