"""What the loop learns from: samples by number, drawn in an order that every process computes alone."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.train.data.order import Order, mix
from penjing.train.data.turns import Turns
from penjing.train.objective.objective import IGNORED, Batch


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


@dataclass(frozen=True)
class Draw:
    """The samples of a micro-batch.

    Attributes:
        samples: (B,) int64.
        real: (B,) bool, which of them count; the others fill the batch up.
        random: (B,) uint64, a number for each that follows from the seed, the epoch and the sample; None: samples are
            taken as they are, to evaluate on.
    """

    samples: NDArray[np.int64]
    real: NDArray[np.bool_]
    random: NDArray[np.uint64] | None = None


class Indexed(Protocol):
    """Indexed by number."""

    def __len__(self) -> int: ...

    def batch(self, draw: Draw) -> Batch:
        """The samples of `draw`, in its order; those that are not real count for nothing."""
        ...


class TokenSamples(ABC):
    """Indexed whose batches have "targets" (B, T)."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """{"tokens": (B, T), "targets": (B, T)}, int64, of the samples in their order."""

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        batch = self.read(draw.samples)
        batch["targets"][torch.from_numpy(~draw.real)] = IGNORED
        return batch


class SampleOrder(Protocol):
    """Which samples a process takes next, as `Order` does."""

    seed: int
    real: NDArray[np.bool_]
    turns: Turns

    def next(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs, samples) of the next micro-batch; `real` then says which of them count."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the sequence depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        ...


O_co = TypeVar("O_co", bound=SampleOrder, covariant=True)


class OrderedStream(Generic[O_co]):
    """The `Stream` of `samples` in `order`.

    Attributes:
        num_compared: samples that tell other data of as many samples apart.
    """

    num_compared = 32

    def __init__(self, samples: Indexed, order: O_co) -> None:
        self.samples, self.order = samples, order

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        epochs, samples = self.order.next()
        random = mix(samples.astype(np.uint64) + (epochs.astype(np.uint64) << np.uint64(40)), self.order.seed)
        return self.samples.batch(Draw(samples, self.order.real, random))

    def state_dict(self) -> dict[str, Any]:
        """The position, see the order, and what the data are."""
        return self.order.state_dict() | {"content": self._content}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see the order. Older states do not say what the data were.

        Raises:
            InputError: as the order, or the data are others.
        """
        self.order.load_state_dict(state)
        refuse_others(state, self._content)

    @cached_property
    def _content(self) -> str:
        """The hash of samples at equal distances as they are, of which the last moves with whatever comes before it
        where texts are packed."""
        found, total = hashlib.sha256(), len(self.samples)
        for place in np.linspace(0, total - 1, min(self.num_compared, total)).round().astype(np.int64):
            batch = self.samples.batch(Draw(np.array([place]), np.array([True])))
            for name, tensor in sorted(batch.items()):
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:32]


def shuffled(
    samples: Indexed, *, batch_size: int, micro_batch: int, rank: int = 0, world_size: int = 1, seed: int = 0
) -> OrderedStream[Order]:
    """Endless micro-batches of `samples`, shuffled anew every epoch; see `Order`.

    Raises:
        InputError: there are none.
    """
    return OrderedStream(samples, Order(len(samples), batch_size, micro_batch, rank, world_size, seed))


def one_pass(
    samples: Indexed,
    most: int | None = None,
    *,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    spread: bool = False,
) -> Iterator[Batch]:
    """One pass over the first `most` samples, or all: this process's micro-batches, as many as every other process has;
    what fills them up is sample 0, which does not count.

    Args:
        spread: `most` samples at equal distances, and not the first: these may all be of one source.
    """
    total = len(samples) if most is None else min(len(samples), most)
    for draw in draws(total, micro_batch, rank, world_size):
        yield samples.batch(replace(draw, samples=draw.samples * len(samples) // total) if spread else draw)


def draws(total: int, micro_batch: int, rank: int, world_size: int) -> Iterator[Draw]:
    """The draws of `one_pass` over `total` samples."""
    per_round = micro_batch * world_size
    for begin in range(rank * micro_batch, -(-total // per_round) * per_round, per_round):
        places = np.arange(begin, begin + micro_batch)
        real = places < total
        yield Draw(np.where(real, places, 0), real)


def refuse_others(state: dict[str, Any], content: str) -> None:
    """Refuse data whose hash is not the "content" of a `state`, if it has one: older ones do not say it.

    Raises:
        InputError: the data are others.
    """
    if state.get("content", content) != content:
        raise InputError(
            "the data are not those that the checkpoint was made with, though as many samples: set [data] and its "
            "files as they were, go on with these by --accept-changes, or start a new run"
        )


def refuse_nonfinite(micro_batches: Sequence[Batch], step: int) -> None:
    """Refuse numbers that nothing can be learnt from.

    Raises:
        InputError: NaN or infinity; names the entry of the batch.
    """
    for batch in micro_batches:
        for name, tensor in batch.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise InputError(
                    f"step {step}: the data hold NaN or infinity ({name!r} of the batch); check what [data] names"
                )
