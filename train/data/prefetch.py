"""Reads batches ahead in a thread, so that the loop does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from penjing.train.data.stream import Stream
from penjing.train.objective.objective import Batch

T = TypeVar("T")


class Prefetched:
    """The batches of `stream`, `depth` of them ready; the state is that of the last batch handed out.

    Args:
        depth: 0: none, and each is made when it is asked for, in the caller's thread.
        pin: copy into page-locked memory, from which a GPU reads without waiting.
    """

    def __init__(self, stream: Stream, depth: int = 4, pin: bool = False) -> None:
        self._stream = stream
        self._pin = pin
        self._ahead = depth > 0
        self._state = stream.state_dict()
        self._ready: queue.Queue[tuple[Batch, dict[str, Any]] | BaseException] = queue.Queue(maxsize=depth)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ahead:
            return self._pinned(next(self._stream))
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="prefetch", daemon=True)
            self._thread.start()
        entry = self._ready.get()
        if isinstance(entry, BaseException):
            self._thread.join()
            self._thread = None
            raise entry
        batch, self._state = entry
        return batch

    def state_dict(self) -> dict[str, Any]:
        """State of the underlying stream after the last batch that was handed out."""
        return self._state if self._ahead else self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop what was read ahead and go on from `state`."""
        self.close()
        self._stream.load_state_dict(state)
        self._state = self._stream.state_dict()

    def change(self, work: Callable[[Any], T]) -> T:
        """Do `work` on the underlying stream where the loop stands, at the end of a step: what was read ahead of that
        is dropped, and read again as the stream is then."""
        self.load_state_dict(self.state_dict())
        result = work(self._stream)
        self._state = self._stream.state_dict()
        return result

    def close(self) -> None:
        """Stop reading; batches read ahead are dropped."""
        self._stopping.set()
        while self._thread is not None and self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.01)
        self._drain()
        self._thread = None
        self._stopping.clear()

    def _drain(self) -> None:
        while not self._ready.empty():
            self._ready.get_nowait()

    def _read(self) -> None:
        try:
            while not self._stopping.is_set():
                batch = self._pinned(next(self._stream))
                self._put((batch, self._stream.state_dict()))
        except BaseException as error:  # belongs to the loop: raised where the batch is asked for
            self._put(error)

    def _pinned(self, batch: Batch) -> Batch:
        return {name: _pinned(tensor) for name, tensor in batch.items()} if self._pin else batch

    def _put(self, entry: tuple[Batch, dict[str, Any]] | BaseException) -> None:
        while not self._stopping.is_set():
            try:
                self._ready.put(entry, timeout=0.1)
            except queue.Full:
                continue
            return


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()
