"""Batches that mix domains: in each step every domain gives its quota, and takes its own samples in its own order.

Quotas follow the weights to within one sample a step, and what a step cannot give is made up for in the next. Which
samples a step has follows from the weights and from how many each domain has given, never from micro-batches or
processes; so it is the same on any number of them, and after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import ConfigError, InputError
from penjing.train.data.mixing import Mixing
from penjing.train.data.order import permute
from penjing.train.data.shards import TokenShards, read_index
from penjing.train.data.stream import OrderedStream, TokenSamples
from penjing.train.data.tokens import TokenRows
from penjing.train.data.turns import Turns
from penjing.train.objective.objective import Batch


def quotas(weights: NDArray[np.float64], batch_size: int, owed: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many samples each domain gives to a step: the largest remainders, over what earlier steps still owe.

    Args:
        weights: (domains,), adding up to 1.
        owed: (domains,), what each should have given more; changed in place.
    """
    owed += weights * batch_size
    given = np.maximum(np.floor(owed + 1e-9), 0).astype(np.int64)
    order = np.argsort(-(owed - given), kind="stable")
    short = batch_size - int(given.sum())
    if short > 0:
        given[order[np.arange(short) % len(order)]] += 1
    while short < 0:  # a domain whose weight fell owes less than it gave
        last = next(place for place in order[::-1] if given[place] > 0)
        given[last] -= 1
        owed[last] += 1e-9
        order = np.argsort(-(owed - given), kind="stable")
        short += 1
    owed -= given
    return given


class Mixture(TokenSamples):
    """Sequences of several domains as samples, those of one domain after those of another."""

    def __init__(self, domains: Sequence[TokenRows]) -> None:
        self._domains = domains
        self._ends = np.cumsum([len(rows) for rows in domains])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """See `TokenSamples`."""
        parts = []
        for sample in samples:
            domain = int(np.searchsorted(self._ends, sample, side="right"))
            rows = self._domains[domain]
            parts.append(rows.read([int(sample - self._ends[domain]) + len(rows)]))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class MixtureOrder:
    """The order of `Mixture`: each step has the quotas of the domains.

    Args:
        sizes: domain → its samples.
        mixing: the weights, which `hear` moves.
        steps: of the run, for `max_epochs`.

    Raises:
        ConfigError: a domain would be repeated more than `mixing.config.max_epochs` times.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        mixing: Mixing,
        *,
        batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        steps: int = 0,
    ) -> None:
        self.mixing, self.seed = mixing, seed
        self.real = np.ones(micro_batch, dtype=bool)
        self._names, self._sizes, self._steps = list(sizes), np.array(list(sizes.values()), np.int64), steps
        self._batch = batch_size
        self.turns = Turns(batch_size, micro_batch, rank, world_size)
        self._taken = np.zeros(len(sizes), np.int64)  # samples that each domain has given to complete steps
        self._owed = np.zeros(len(sizes))
        self._step, self._part = 0, 0
        self._rows = np.empty((2, 0), np.int64)  # epochs and samples of the step at hand
        self._check_epochs()

    def next(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `SampleOrder`."""
        if not self._part:
            self._rows = self._step_rows()
        begin = self.turns.begin(self._part)
        places = np.arange(begin, begin + self.turns.micro_batch)
        self.real = places < self._batch
        epochs, samples = self._rows[:, np.minimum(places, self._batch - 1)]
        self._part += 1
        if self._part == self.turns.own:
            self._part, self._step = 0, self._step + 1
        return epochs, samples

    def hear(self, losses: Mapping[str, float]) -> list[str]:
        """Move the weights of the steps to come by the held-out losses of the domains, at the end of a step; the
        domains that were raised."""
        weights = self.mixing.weights
        left = max(0, self._steps - self._step) * self._batch
        factor = self.mixing.config.factor
        may_rise = {
            name: (self._taken[place] + left * min(1.0, weights[name] * factor)) / self._sizes[place]
            <= self.mixing.config.max_epochs
            for place, name in enumerate(self._names)
        }
        return self.mixing.hear(losses, may_rise)

    def state_dict(self) -> dict[str, Any]:
        """The position, the weights, and what both depend on."""
        return {
            "step": self._step, "batch_size": self._batch, "seed": self.seed, "num_samples": int(self._sizes.sum()),
            "taken": self._taken.tolist(), "owed": self._owed.tolist(), "mixing": self.mixing.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the end of a step.

        Raises:
            InputError: the data, their domains or the batch size have changed.
        """
        self.mixing.load_state_dict(state["mixing"])
        mine = self.state_dict()
        for name in ("num_samples", "batch_size", "seed"):
            if state[name] != mine[name]:
                raise InputError(
                    f"the checkpoint was made with {name}={state[name]}, this run has {mine[name]}; set [data] and "
                    "seed as they were, or start a new run"
                )
        self._taken, self._owed = np.array(state["taken"], np.int64), np.array(state["owed"], np.float64)
        self._step, self._part = int(state["step"]), 0

    def _step_rows(self) -> NDArray[np.int64]:
        weights = np.array([self.mixing.weights[name] for name in self._names])
        given = quotas(weights, self._batch, self._owed)
        rows = []
        for domain, count in enumerate(given.tolist()):
            position = np.arange(self._taken[domain], self._taken[domain] + count)
            size, before = int(self._sizes[domain]), int(self._sizes[:domain].sum())
            for epoch in np.unique(position // size).tolist():
                inside = (position[position // size == epoch] % size).astype(np.uint64)
                key = (self.seed * 1_000_003 + epoch) * 8191 + domain
                rows.append(np.stack([np.full(len(inside), epoch), before + permute(inside, size, key)]))
        self._taken += given
        # processes get like shares of each domain: which ones is another permutation in every step
        order = permute(np.arange(self._batch, dtype=np.uint64), self._batch, self.seed * 1_000_003 + self._step)
        return np.concatenate(rows, 1)[:, order]

    def _check_epochs(self) -> None:
        for place, name in enumerate(self._names):
            epochs = self._steps * self._batch * self.mixing.weights[name] / self._sizes[place]
            if epochs > self.mixing.config.max_epochs:
                raise ConfigError(
                    f"data.mixing: {self._steps:,} steps would repeat domain {name!r} {epochs:.3g} times, more than "
                    f"max_epochs = {self.mixing.config.max_epochs:g}; give it more text or less weight, or raise that"
                )


def mixed(
    shards: Mapping[str, TokenShards], mixing: Mixing, length: int, *, document_mask: bool = False, **more: int
) -> OrderedStream[MixtureOrder]:
    """Endless micro-batches of sequences of several domains.

    Args:
        shards: domain → its tokens.
        more: as of `MixtureOrder`.

    Raises:
        ConfigError: as `MixtureOrder`.
        InputError: a domain has less than one sequence.
    """
    rows = {name: TokenRows(each, length, document_mask) for name, each in shards.items()}
    for name, each in rows.items():
        if not len(each):
            raise InputError(
                f"data.mixing: domain {name!r} has less than one sequence of {length} tokens; give it more text, or "
                "leave it out"
            )
    order = MixtureOrder({name: len(each) for name, each in rows.items()}, mixing, **more)
    return OrderedStream(Mixture(list(rows.values())), order)


def domain_shards(folder: Path, split: str) -> dict[str, TokenShards]:
    """Domain → its tokens of a split ("train" or "held_out"), in the order of the names.

    Raises:
        InputError: the shards were not packed by domain.
    """
    splits = [name for name in read_index(folder).splits if name.startswith(f"{split}@")]
    if not splits:
        raise InputError(
            f"the shards in {folder} have no domains in split {split!r}, which data.mixing needs; give data.sources, "
            "or leave mixing out"
        )
    return {name.partition("@")[2]: TokenShards(folder, name) for name in sorted(splits)}
