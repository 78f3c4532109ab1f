"""The order of samples: an endless sequence of shuffled epochs that every process computes alone, from any position.

Position p of the sequence is sample `permutation of epoch p // n` at `p mod n`. Step s takes positions [s·batch,
(s+1)·batch), so which samples a step sees does not depend on micro-batches or the number of processes; only who
computes them does. Where micro-batches of equal size do not divide the batch, the last of a step are filled up with
samples that do not count. Who takes which of them is the business of `Turns`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.train.data.turns import Turns

_ROUNDS = 4


def mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A well-mixed 64-bit hash of each value under `key` (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64((key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def step_seed(seed: int, step: int, rank: int) -> int:
    """A well-mixed 63-bit seed of a process's step (splitmix64's finaliser)."""
    value = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1


def permute(index: NDArray[np.uint64], size: int, key: int) -> NDArray[np.int64]:
    """Where each index (0 ≤ index < size) goes in a pseudo-random permutation of `size` things; needs no table.

    A Feistel network over the next even number of bits, walked until it lands inside (Black and Rogaway, 2002).
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = np.uint64((1 << half) - 1)
    result = index.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (mix(right, key * _ROUNDS + round_) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside &= result >= size
    return result.astype(np.int64)


def permute_near(index: NDArray[np.uint64], size: int, key: int, group: int, window: int) -> NDArray[np.int64]:
    """As `permute`, but neighbours of the result come from few places: `group` things that follow each other stay
    together, and only those of `window` groups are mixed with each other. What is left over comes last.

    So a reader of storage far away reads each of its blocks once, and knows which come next.
    """
    groups = size // group
    if groups < 2:
        return permute(index, size, key)
    result = np.empty(len(index), np.int64)
    rest = index >= groups * group
    if rest.any():
        result[rest] = groups * group + permute(index[rest] - np.uint64(groups * group), size - groups * group, key)
    inside = np.flatnonzero(~rest)
    number = index[inside] // np.uint64(window * group)  # of the window
    for each in np.unique(number):
        here = inside[number == each]
        begin = int(each) * window
        mixed = min(window, groups - begin)
        place = permute(index[here] - np.uint64(begin * group), mixed * group, key * 1_000_003 + int(each))
        chosen = permute((begin + place // group).astype(np.uint64), groups, key)
        result[here] = chosen * group + place % group
    return result


class Order:
    """Which samples this process takes next, micro-batch by micro-batch.

    Args:
        num_samples: samples of an epoch.
        batch_size: samples of a step over all processes.
        micro_batch: samples of one micro-batch of one process.
        rank, world_size: this process and how many there are.
        shuffle: False keeps the stored order in every epoch.
        near: (samples of a group, groups that are mixed), for `permute_near`; None mixes all samples.

    Attributes:
        turns: which of a step's micro-batches are this process's; may change between steps.
        real: (micro_batch,) bool, which samples of the last micro-batch count.
        seed: what the order depends on.

    Raises:
        InputError: no samples.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        micro_batch: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        near: tuple[int, int] | None = None,
    ) -> None:
        if num_samples < 1:
            raise InputError("the data hold no complete sample; give more data, or lower data.sequence_length")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.turns = Turns(batch_size, micro_batch, rank, world_size)
        self.real = np.ones(micro_batch, dtype=bool)
        self.seed = seed
        self._shuffle = shuffle
        self._near = near
        self._taken = 0  # samples that all processes together have taken in complete steps
        self._part = 0  # of this process's micro-batches of the step at hand

    def next(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs, samples), each (micro_batch,) int64, of the next micro-batch."""
        begin, end = self._taken + self.turns.begin(self._part), self._taken + self.batch_size
        self._part += 1
        if self._part == self.turns.own:
            self._taken, self._part = end, 0
        position = np.arange(begin, begin + self.turns.micro_batch, dtype=np.uint64)
        self.real = position < end
        position = np.minimum(position, np.uint64(end - 1))
        epochs = (position // np.uint64(self.num_samples)).astype(np.int64)
        index = position % np.uint64(self.num_samples)
        if not self._shuffle:
            return epochs, index.astype(np.int64)
        samples = np.empty(len(position), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._permuted(index[here], int(epoch))
        return epochs, samples

    def coming(self, num_samples: int) -> NDArray[np.int64]:
        """(num_samples,) the samples that all processes together take next, of which `next` gives this one its own."""
        position = np.arange(self._taken, self._taken + num_samples, dtype=np.uint64)
        epochs = (position // np.uint64(self.num_samples)).astype(np.int64)
        index = position % np.uint64(self.num_samples)
        parts = [self._permuted(index[epochs == epoch], int(epoch)) for epoch in np.unique(epochs)]
        return np.concatenate(parts)

    def _permuted(self, index: NDArray[np.uint64], epoch: int) -> NDArray[np.int64]:
        key = self.seed * 1_000_003 + epoch
        if self._near is None:
            return permute(index, self.num_samples, key)
        return permute_near(index, self.num_samples, key, *self._near)

    def state_dict(self) -> dict[str, Any]:
        """The position in the sequence, of whole steps, and what the sequence depends on."""
        return {
            "taken": self._taken,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            **({} if self._near is None else {"near": list(self._near)}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the end of a step.

        Raises:
            InputError: the data or the batch size have changed, so that the sequence would be another.
        """
        mine = self.state_dict()
        for name in ("num_samples", "batch_size", "seed", "near"):
            if state.get(name) != mine.get(name):
                held = " and whether there are evaluations (evaluation.every), for which samples are held out,"
                raise InputError(
                    f"the checkpoint was made with {name}={state.get(name)}, this run has {mine.get(name)}; "
                    f"set [data] and seed{held if name == 'num_samples' else ''} as they were, or start a new run"
                )
        self._taken, self._part = int(state["taken"]), 0
