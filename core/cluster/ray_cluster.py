"""Functions as tasks of a Ray cluster, whose lost nodes cost their own tasks only.

Ray places the tasks, by processors, GPUs and resources with names of the user's, and runs those of a lost node again;
nothing here schedules. What tasks read and write lies in files that every node sees, so that results travel as names.
Ray is imported where a recipe asks for it. (https://docs.ray.io/en/latest/ray-core/fault-tolerance.html)
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, field_validator

from penjing.core.cluster.answers import answer_of, failure
from penjing.core.config import Config
from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text

K = TypeVar("K")
_LOOK_SECONDS = 2.0


class RaySettings(Config):
    """`[ray]`: tasks run on a Ray cluster, whose nodes have penjing installed and see the same files."""

    address: str = Field(
        default="auto",
        description='Of the cluster, such as "10.0.0.1:6379"; "auto" is the one this machine is part of.',
    )
    cpus: float = Field(
        default=1.0, ge=0, description="Processors that a task reserves; it computes in as many threads."
    )
    gpus: float = Field(default=0.0, ge=0, description="GPUs that a task reserves.")
    resources: dict[str, float] = Field(
        default={},
        description="Other resources that a task reserves, such as { npu = 1 }; a node has those that `ray start "
        "--resources` gave it.",
    )
    retries: int = Field(
        default=3, ge=0, description="Times that a task runs again after its process or node was lost."
    )
    patience: float = Field(
        default=300.0,
        gt=0,
        description="Seconds to wait for a node that can take a task, before the run ends; what is done is kept.",
    )

    @field_validator("resources")
    @classmethod
    def _amounts(cls, values: dict[str, float]) -> dict[str, float]:
        for name, amount in values.items():
            if name.upper() in ("CPU", "GPU"):
                raise ValueError(f"{name!r} has a setting of its own: {name.lower()}s")
            if amount <= 0:
                raise ValueError(f"{name} = {amount:g} must be above 0")
        return values

    @property
    def needs(self) -> dict[str, float]:
        """What a task reserves, as Ray names it."""
        named = {"CPU": self.cpus, "GPU": self.gpus} | self.resources
        return {name: amount for name, amount in named.items() if amount}


class RayCluster:
    """Runs one function as many tasks. May be used from several threads.

    Args:
        function: of a module, with arguments and a result of plain values; runs in this process's working folder.
        shared: a folder that every node must see.

    Raises:
        SetupError: Ray is not installed, there is no cluster, no node has what a task needs, none is free within
            `patience`, or a node has another version of penjing or does not see `shared`.
    """

    def __init__(self, settings: RaySettings, function: Callable[..., Any], shared: Path) -> None:
        self.settings = settings
        self._ray = connected_ray(settings)
        self._check_nodes()
        self._options: dict[str, Any] = {
            "num_cpus": settings.cpus,
            "num_gpus": settings.gpus,
            "resources": settings.resources,
            "max_retries": settings.retries,
        }
        self._run = self._ray.remote(**self._options)(_in_folder)
        self._function, self._folder = function, str(Path.cwd())
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._stopped = False
        self._probe(shared)

    def results(self, calls: Mapping[K, Sequence[Any]]) -> Iterator[tuple[K, Any]]:
        """The key of each call with its result, as they are done. Whatever ends this ends the tasks that are left.

        Raises:
            PenjingError: the first error of a task, or one that was lost with its process more often than `retries`.
        """
        with self._started(calls) as keys:
            for ref in self._as_done(keys):
                yield keys[ref], self._told(ref, str(keys[ref]))

    def run(self, name: str, *values: Any) -> Any:
        """The result of one call, or None once `stop` was called; `name` is for messages.

        Raises:
            PenjingError: see `results`.
        """
        if self._stopped:
            return None
        with self._started({name: values}) as keys:
            for ref in self._as_done(keys):
                return self._told(ref, name)
        return None

    def stop(self) -> None:
        """End all tasks; none is begun any more."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for ref in running:
            self._cancel(ref)

    @contextmanager
    def _started(self, calls: Mapping[K, Sequence[Any]]) -> Iterator[dict[Any, K]]:
        keys: dict[Any, K] = {}
        try:
            for key, values in calls.items():
                ref = self._run.remote(self._folder, self._function, values)
                keys[ref] = key
                with self._lock:
                    self._running.add(ref)
            yield keys
        finally:
            with self._lock:
                left = self._running & keys.keys()
                self._running -= left
            for ref in left:
                self._cancel(ref)

    def _as_done(self, keys: Mapping[Any, object]) -> Iterator[Any]:
        left, seen = list(keys), time.monotonic()
        while left and not self._stopped:
            with self._said():
                done, left = self._ray.wait(left, num_returns=1, timeout=_LOOK_SECONDS)
            for ref in done:
                with self._lock:
                    self._running.discard(ref)
                if not self._stopped:
                    yield ref
            if done or self._able():
                seen = time.monotonic()
            elif time.monotonic() - seen > self.settings.patience:
                self._check_nodes()

    def _told(self, ref: Any, name: str) -> Any:
        with self._said(name):
            answer = self._ray.get(ref)
        if "error" in answer:
            raise failure(answer["code"], answer["error"])
        return answer["result"]

    def _cancel(self, ref: Any) -> None:
        with suppress(self._ray.exceptions.RayError):  # it is done, or its node is gone
            self._ray.cancel(ref, force=True)

    @contextmanager
    def _said(self, name: str = "") -> Iterator[None]:
        """What Ray says of lost processes and connections, as an error for users."""
        what = f"task {name}" if name else "a task"
        try:
            yield
        except (self._ray.exceptions.RayTaskError, self._ray.exceptions.RaySystemError) as error:
            # errors of the work itself come as answers, so this is a process that could not begin it
            raise SetupError(
                f"a node of the Ray cluster cannot run penjing ({_last(error)}); install the same version there, and "
                "all packages that the recipe needs. What is done is kept"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise SetupError(
                f"{what} was lost with its process or node, and so were its {self.settings.retries} repetitions "
                f"({type(error).__name__}: {_first(error)}); what is done is kept. It may need more memory than a node "
                "has: raise ray.cpus so that fewer run beside each other, and give the same command again"
            ) from None

    def _able(self) -> bool:
        """Whether a node that lives could take a task, were it idle."""
        needs = self.settings.needs
        return any(
            all(node["Resources"].get(name, 0) >= amount for name, amount in needs.items())
            for node in self._ray.nodes()
            if node["Alive"]
        )

    def _check_nodes(self) -> None:
        if not self._able():
            wanted = ", ".join(f"{name} = {amount:g}" for name, amount in self.settings.needs.items())
            living = sum(bool(node["Alive"]) for node in self._ray.nodes())
            raise SetupError(
                f"none of the {living} nodes of the Ray cluster has {wanted}, which a task needs; start one that has "
                "(ray start --num-cpus, --resources), or lower what [ray] reserves. What is done is kept"
            )

    def _probe(self, shared: Path) -> None:
        """Try a task that does nothing: whether one is taken, by a node that has this penjing and these files."""
        mark = shared / f".ray-{secrets.token_hex(6)}"
        atomic_write_text(mark, version("penjing"))
        try:
            ref = self._ray.remote(**self._options)(_found).remote(self._folder, str(mark))
            with self._said("0, a trial"):
                done, _ = self._ray.wait([ref], timeout=self.settings.patience)
                if not done:
                    self._cancel(ref)
                    raise SetupError(
                        f"the Ray cluster is full: no task was begun within ray.patience = {self.settings.patience:g} "
                        "seconds; wait for other work there, add nodes, or raise ray.patience. What is done is kept"
                    )
                found = self._ray.get(ref)
        finally:
            mark.unlink(missing_ok=True)
        if found is None:
            raise SetupError(
                f"a node of the Ray cluster does not see {shared.absolute()}; choose an output on a file system that "
                "all nodes share, at the same place"
            )
        if found != version("penjing"):
            raise SetupError(
                f"a node of the Ray cluster has penjing {found}, and this machine {version('penjing')}; install "
                "the same"
            )


def connected_ray(settings: RaySettings) -> Any:
    """The module ray, connected to the cluster.

    Raises:
        SetupError: it is not installed, or there is no cluster.
    """
    try:
        ray = import_module("ray")
    except ImportError:
        raise SetupError("[ray] needs the package ray, which is not installed: pip install 'penjing[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=settings.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise SetupError(
                f"no Ray cluster answers at ray.address = {settings.address!r} ({_first(error)}); start one by "
                "`ray start --head`, give the address of another, or leave [ray] out to run on this machine"
            ) from None
    return ray


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason is given")


def _last(error: Exception) -> str:
    """Of a traceback that Ray tells as text, what was raised."""
    return next(iter(reversed(str(error).strip().splitlines())), "no reason is given")


def _in_folder(folder: str, function: Callable[..., Any], values: Sequence[Any]) -> dict[str, Any]:
    """A task, in a process of Ray's."""

    def work() -> Any:
        _enter(folder)
        return function(*values)

    return answer_of(work)


def _found(folder: str, mark: str) -> str | None:
    if not Path(folder).is_dir():
        return None
    os.chdir(folder)
    return version("penjing") if Path(mark).exists() else None


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise SetupError(
            f"a node of the Ray cluster cannot enter {folder} ({error.strerror}); all nodes must see the same files"
        ) from None
