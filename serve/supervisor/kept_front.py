"""The supervisor's side of the HTTP front: what it is told, and what happens when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.config import Config
from penjing.core.errors import ServerError, SetupError
from penjing.core.family import sees
from penjing.serve.client.protocol import TOWERS
from penjing.serve.engine.config import BatchConfig, EngineConfig
from penjing.serve.families.base import Family
from penjing.serve.gate.config import FrontConfig, FrontJob, FrontModel
from penjing.serve.site.process import FrontProcess
from penjing.serve.supervisor import state
from penjing.serve.supervisor.process import LOOPBACK, ServeConfig
from penjing.serve.triton.adapter_list import ServedAdapters, read_list, said_path, stamp_of

MAX_LOST_STARTS = 3


def front_model(config: ServeConfig, folder: Path, family: Family, settings: Config, **names: Any) -> FrontModel:
    """What the front must know of a served model. `names` are further fields of `FrontModel`."""
    facts: dict[str, Any] = {
        "id": folder.name,
        "kind": family.name,
        "name": config.model_name or family.name,
        "folder": folder,
        "grpc": config.address(config.grpc_port),
        "metrics": f"{LOOPBACK}:{config.metrics_port}",
        "sees": sees(folder) or family.name == TOWERS,
        "adapters": named_adapters(config.grpc_port, settings),
        "max_rows": settings.max_batch_size if isinstance(settings, BatchConfig) else None,
    }
    return FrontModel(**facts | names)


def named_adapters(grpc_port: int, settings: Config) -> tuple[str, ...]:
    """The adapters that the model's process says it has; before it says anything, those that it was started with."""
    if not isinstance(settings, EngineConfig):
        return ()
    said = read_list(said_path(state.adapters_path(grpc_port)), ServedAdapters)
    return tuple(settings.adapters if said is None else said.adapters)


def adapters_stamp(grpc_port: int) -> tuple[int, ...]:
    """Another one whenever the adapters of the model have changed."""
    return stamp_of(said_path(state.adapters_path(grpc_port)))


class KeptFront:
    """The front before `models`, or none where there is no configuration of one. Its files are those of `grpc_port`."""

    def __init__(self, front: FrontConfig | None, models: tuple[FrontModel, ...], grpc_port: int) -> None:
        self._process: FrontProcess | None = None
        self._log = state.log_path(grpc_port)
        self._job = None if front is None else FrontJob(front=front, models=models, log=state.front_log_path(grpc_port))

    def start(self) -> None:
        """It says 503 until there is a model.

        Raises:
            SetupError: the disk is full, or the machine has no room for another process.
        """
        if self._job is not None:
            try:
                self._process = FrontProcess(self._job, self._log)
            except OSError as error:
                raise SetupError(
                    f"the HTTP front cannot be started: {error}; end other programs and run again"
                ) from error

    def show(self, models: tuple[FrontModel, ...]) -> None:
        """From now on it stands before these."""
        if self._job is not None:
            self._job = self._job.model_copy(update={"models": models})
        if self._process is not None:
            self._process.show(models)

    @property
    def has_heard(self) -> bool:
        """Whether it knows of the last `show`."""
        return self._process is None or self._process.has_heard

    @property
    def pid(self) -> int:
        """Of its process; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def keep(self, *, starting: bool) -> str | None:
        """Start it again if it has ended or hangs, which the models behind it do not notice; says so, once.

        Raises:
            ServerError: `starting`, and it ends again and again.
        """
        failure = None if self._process is None else self._process.keep()
        if failure and starting and self._process is not None and self._process.restarts >= MAX_LOST_STARTS:
            raise ServerError(f"{failure}; the end of {self._log}:\n{state.tail(self._log)}")
        return failure and f"{failure}; restarting"

    def answers(self) -> bool:
        """Whether clients get answers through it; True where there is none."""
        return self._process is None or self._process.answers()

    @property
    def ready(self) -> bool:
        """Whether every model has answered it within ten seconds; True where there is none."""
        return self._process is None or self._process.ready

    def drain(self) -> None:
        """It refuses requests from now on."""
        if self._process is not None:
            self._process.drain()

    def end(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.end()
