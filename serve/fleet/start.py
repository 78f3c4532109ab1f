"""`penjing serve NAME=FOLDER …`: what can be refused is refused here, before anything is started."""

from __future__ import annotations

import sys

from penjing.core.progress import Progress, progress_bar
from penjing.serve.fleet.fleet import Fleet
from penjing.serve.fleet.plan import FleetPlan
from penjing.serve.fleet.state import read_fleet
from penjing.serve.site.process import check_front
from penjing.serve.supervisor import state
from penjing.serve.supervisor.detach import READY, start_behind
from penjing.serve.supervisor.install import install
from penjing.serve.supervisor.process import check_ports


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

    def is_ready(pid: int) -> bool:
        found = read_fleet(plan.port)
        return found is not None and found.pid == pid and found.state == READY

    errors = state.run_folder() / f"{plan.port}.fleet.log"
    start_behind(command, errors, is_ready, "the process that keeps the models ended")
    progress.advance()
    flag = "" if plan.port == 8001 else f" --grpc-port {plan.port}"
    progress.note(f"{plan.names}: ready. {plan.endpoints}; end them with 'penjing stop{flag}'")
