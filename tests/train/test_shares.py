"""Unlike shares of a batch: the choice against brute force, the samples of a step, what is kept and refused."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.errors import ConfigError
from penjing.train.data.order import Order
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.stream import Draw, shuffled
from penjing.train.objective.objective import Batch
from penjing.train.parallel.share_balancer import ShareBalancer, fairest
from penjing.train.pipeline.balance import StageClock
from penjing.train.processes.world import World
from penjing.train.shares import Shares

SECONDS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(SECONDS, st.integers(0, 8))
def test_no_other_shares_end_sooner(seconds: list[float], more: int) -> None:
    total = len(seconds) + more
    counts = fairest(seconds, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    every = (each for each in itertools.product(range(1, total + 1), repeat=len(seconds)) if sum(each) == total)
    best = min(max(n * s for n, s in zip(each, seconds, strict=True)) for each in every)
    assert max(n * s for n, s in zip(counts, seconds, strict=True)) == pytest.approx(best)


def test_half_the_speed_is_half_the_share_and_noise_moves_nothing() -> None:
    dice = random.Random(0)
    balancer = ShareBalancer((7, 7, 6))
    history = []
    for step in range(60):
        slow = 40.0 if step in (20, 21) else 2.0  # something disturbs two steps
        balancer = balancer.observe([each * dice.uniform(0.98, 1.02) for each in (1.0, slow, 1.0)])
        counts = balancer.decide()
        history.append(counts)
        balancer = ShareBalancer(counts, balancer.gain, balancer.seen)
    assert history[:2] == [(7, 7, 6)] * 2
    assert len(set(history[2:])) == 1
    assert history[-1] == (8, 4, 8)
    assert balancer.idle < 0.02


def test_it_moves_back_when_the_speed_comes_back() -> None:
    balancer = ShareBalancer((4, 2))
    for _ in range(5):
        balancer = balancer.observe((1.0, 1.0))
    assert balancer.decide() == (3, 3)


@pytest.mark.parametrize("seconds", [(1.0,), (0.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_times_that_are_none_are_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="2 times above 0 seconds are needed"):
        ShareBalancer((2, 2)).observe(seconds)


@pytest.mark.parametrize(("batch", "micro"), [(12, 2), (12, 1), (13, 2), (5, 4)])
def test_a_step_has_the_same_samples_whatever_the_shares(batch: int, micro: int) -> None:
    def steps(orders: list[Order]) -> list[list[int]]:
        found = []
        for _ in range(5):
            step = []
            for order in orders:
                for _ in range(order.turns.own):
                    samples = order.next()[1]
                    step += samples[order.real].tolist()
            found.append(sorted(step))
        return found

    alone = steps([Order(40, batch, batch, 0, 1, seed=3)])
    pieces = max(-(-batch // micro), 3)
    for counts in ((pieces - 2, 1, 1), (1, pieces - 2, 1)):
        orders = [Order(40, batch, micro, rank, 3, seed=3) for rank in range(3)]
        for order in orders:
            order.turns.counts = counts
        assert steps(orders) == alone


class Numbers:
    """Samples that are their numbers."""

    def __len__(self) -> int:
        return 48

    def batch(self, draw: Draw) -> Batch:
        return {"number": torch.from_numpy(np.where(draw.real, draw.samples, -1))}


class Told(StageClock):
    """A clock that says what it is told."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__(torch.device("cpu"))
        self.forward, self.whole, self.count = forward, forward + backward, 0

    @contextmanager
    def piece(self, stage: int, kind: str) -> Iterator[None]:
        yield
        self._pieces[stage, kind].append({"forward": self.forward, "whole": self.whole, "last": 99.0}[kind])


class Together(World):
    """This process, and others that take `factors` times as long."""

    factors = (1.0, 2.0)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        own = values[:, self.rank].clone()
        for rank, factor in enumerate(self.factors):
            values[:, rank] = own * torch.tensor([factor / self.factors[self.rank], 1.0], dtype=values.dtype)
        return values


def shares_of(rank: int, batch: int = 12, micro: int = 2) -> tuple[Shares, Prefetched, list[str]]:
    stream = Prefetched(shuffled(Numbers(), batch_size=batch, micro_batch=micro, rank=rank, world_size=2), depth=3)
    notes: list[str] = []
    clock = Told(1.0 * Together.factors[rank], 4.0 * Together.factors[rank])
    return Shares(Together(rank, 2), stream, batch, micro, notes.append, clock=clock), stream, notes


def run(shares: Shares, stream: Prefetched, steps: int) -> tuple[list[int], list[dict[str, float]]]:
    seen, records = [], []
    for _ in range(steps):
        own = shares.own
        for part in range(own):
            with shares.whole(part == own - 1), shares.forward():
                seen += next(stream)["number"].tolist()
        records.append(shares.after_step())
    return seen, records


def test_the_slow_process_gets_less_and_the_stream_follows() -> None:
    pair = [shares_of(rank) for rank in range(2)]
    seen = [run(shares, stream, 8) for shares, stream, _ in pair]
    assert [shares.own for shares, _, _ in pair] == [4, 2]
    alone = shuffled(Numbers(), batch_size=12, micro_batch=12)
    assert sorted(seen[0][0] + seen[1][0]) == sorted(
        number for _ in range(8) for number in next(alone)["number"].tolist()
    )
    first, last = seen[0][1][0], seen[0][1][-1]
    assert (first["share_largest"], first["share_smallest"]) == (6, 6)
    assert (last["share_largest"], last["share_smallest"], last["share_idle"]) == (8, 4, 0.0)
    assert pair[0][2] == [
        "shares: the processes take 8 + 4 samples from the next step on; 25% of their time was spent waiting, 0% is "
        "expected"
    ]
    for _, stream, _ in pair:
        stream.close()


def test_a_process_with_one_micro_batch_is_judged_by_its_forward_pass() -> None:
    """It has none that does not wait for others; how much more the whole took is remembered, also over a resume."""
    shares, stream, _ = shares_of(1, batch=8)
    run(shares, stream, 6)
    assert shares.own == 1
    again, fresh, _ = shares_of(1, batch=8)
    again.load_state_dict(json.loads(json.dumps(shares.state_dict())))
    assert again.own == 1
    run(again, fresh, 8)
    assert again._balancer.seconds == pytest.approx((5.0, 10.0))
    stream.close()
    fresh.close()


def test_shares_go_on_and_begin_anew_with_other_micro_batches() -> None:
    shares, stream, _ = shares_of(0)
    run(shares, stream, 6)
    kept = json.loads(json.dumps(shares.state_dict()))
    same, one, _ = shares_of(0)
    same.load_state_dict(kept)
    assert same.own == 4
    other, two, _ = shares_of(0, micro=1)
    other.load_state_dict(kept)
    assert other.own == 6
    for each in (stream, one, two):
        each.close()


def test_data_without_numbers_are_refused() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Batch:
            return {}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match="hands out samples by their numbers, and these data have none"):
        Shares(World(0, 2), Prefetched(Endless()), 8, 2, print)
