"""The contract of the loop with whatever it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from penjing.train.objective.objective import Batch


class Stream(Protocol):
    """An endless iterator of micro-batches: this process's share, on the CPU."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from; the same in every process, whatever their number."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        ...
