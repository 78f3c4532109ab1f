"""As much of Ray as penjing calls, in threads of this process, with nodes that are full, poor or lost when told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class RaySystemError(RayError):
    pass


class WorkerCrashedError(RayError):
    pass


class FakeRay:
    """Stands for the module `ray`.

    Args:
        resources: of its one node. full: no task is ever begun. lost: tasks, by their number, whose process dies.
        broken: tasks cannot import penjing.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, RaySystemError=RaySystemError)

    def __init__(
        self,
        resources: dict[str, float] | None = None,
        *,
        full: bool = False,
        lost: Sequence[int] = (),
        broken: bool = False,
    ) -> None:
        self.resources = {"CPU": 2.0} if resources is None else resources
        self.full, self.lost, self.broken = full, lost, broken
        self.address = ""
        self.options: dict[str, Any] = {}
        self.begun, self.cancelled = 0, 0
        self._pool = ThreadPoolExecutor(1)

    def is_initialized(self) -> bool:
        return bool(self.address)

    def init(self, address: str, **_: Any) -> None:
        if address == "nowhere:1":
            raise ConnectionError("Could not find any running Ray instance.\nmore")
        self.address = address

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.resources}, {"Alive": False, "Resources": {"CPU": 1e9, "npu": 9}}]

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        self.options = options

        def decorate(function: Callable[..., Any]) -> Any:
            return SimpleNamespace(remote=lambda *values: self._begin(function, values))

        return decorate

    def wait(
        self, refs: list[Future[Any]], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        done, _ = wait(refs, min(timeout or 0.05, 0.05) if self.full else timeout, FIRST_COMPLETED)
        first = [ref for ref in refs if ref in done][:num_returns]
        return first, [ref for ref in refs if ref not in first]

    def get(self, ref: Future[Any]) -> Any:
        return ref.result()

    def cancel(self, ref: Future[Any], *, force: bool) -> None:
        assert force
        self.cancelled += 1
        ref.cancel()

    def _begin(self, function: Callable[..., Any], values: Sequence[Any]) -> Future[Any]:
        if self.full:
            return Future()
        number, self.begun = self.begun, self.begun + 1
        return self._pool.submit(self._task, number, function, values)

    def _task(self, number: int, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        if self.broken:
            raise RayTaskError("Traceback\nModuleNotFoundError: No module named 'penjing'")
        if number in self.lost:
            raise WorkerCrashedError("The worker died unexpectedly while executing this task.\nmore")
        return function(*values)
