"""The layer split against brute force; the micro-batch balancer against pipelines whose costs are known."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.errors import ConfigError
from penjing.train.pipeline.balancer import MicroBatchBalancer, Observation
from penjing.train.pipeline.simulate import StageTimes, simulate
from penjing.train.pipeline.split import equal_split, split_layers, stage_costs

COSTS = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 10.0)), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(COSTS, st.data())
def test_the_split_is_the_best_there_is(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    bounds = split_layers(costs, stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(a < b for a, b in pairwise(bounds))
    every = [(0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), stages - 1)]
    best = min(max(stage_costs(costs, cut)) for cut in every)
    assert max(stage_costs(costs, bounds)) == pytest.approx(best)
    loads = [stage_costs(costs, cut) for cut in every]
    squares = [sum(c * c for c in load) for load in loads if max(load) <= best + 1e-9]
    assert sum(c * c for c in stage_costs(costs, bounds)) == pytest.approx(min(squares))


def test_a_heavy_head_gets_a_stage_with_fewer_layers():
    costs = [1.0] * 15 + [3.0]
    assert stage_costs(costs, equal_split(16, 4)) == (4, 4, 4, 6)
    assert max(stage_costs(costs, split_layers(costs, 4))) == 5


@pytest.mark.parametrize(("costs", "stages"), [([1.0], 2), ([1.0], 0), ([], 1), ([1.0, -1.0], 1), ([float("inf")], 1)])
def test_impossible_splits_are_refused(costs, stages):
    with pytest.raises(ConfigError, match=r"cannot be split|must be finite"):
        split_layers(costs, stages)


class Pipeline:
    """A machine with known costs: seconds = slow × (fixed + rate × samples) × noise."""

    def __init__(self, fixed, rates, noise=0.0, seed=0):
        self.fixed, self.rates, self.noise, self.slow = fixed, rates, noise, 1.0
        self.random = random.Random(seed)

    def _time(self, rate, size):
        return self.slow * (self.fixed + rate * size) * (1 + self.noise * self.random.uniform(-1, 1))

    def step(self, size):
        forward = tuple(self._time(rate, size) for rate in self.rates)
        return Observation(size, forward, tuple(self._time(2 * rate, size) for rate in self.rates))

    def makespan(self, schedule, ranks, batch, size):
        f = tuple(self.slow * (self.fixed + rate * size) for rate in self.rates)
        b = tuple(self.slow * (self.fixed + 2 * rate * size) / 2 for rate in self.rates)
        return simulate(schedule, ranks, StageTimes(f, b, b), [1.0] * (batch // size)).makespan


def run(pipeline, balancer, steps):
    sizes = []
    for _ in range(steps):
        size = balancer.decide().size
        assert balancer.batch % size == 0
        assert size <= balancer.largest
        sizes.append(size)
        balancer = balancer.observe(pipeline.step(size))
    return sizes, balancer


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "zbv"]),
    st.floats(0.0, 3.0),
    st.lists(st.floats(0.3, 2.0), min_size=6, max_size=6),
    st.sampled_from([24, 48, 64]),
    st.integers(1, 16),
)
def test_it_finds_the_best_size_in_three_steps_and_stays(schedule, fixed, rates, batch, largest):
    ranks = 3
    pipeline = Pipeline(fixed, rates if schedule == "zbv" else rates[:ranks])
    balancer = MicroBatchBalancer(schedule, ranks, batch, largest)
    sizes, balancer = run(pipeline, balancer, 6)
    best = min(pipeline.makespan(schedule, ranks, batch, size) for size in balancer.sizes)
    reached = pipeline.makespan(schedule, ranks, batch, sizes[2])
    assert reached <= best / (1 - balancer.gain) + 1e-9
    assert set(sizes[2:]) == {sizes[2]}
    assert balancer.predict(sizes[2]).makespan == pytest.approx(reached)


def test_noise_and_a_machine_that_slows_down_do_not_move_it():
    pipeline = Pipeline(0.6, [1.0, 1.2, 0.9, 1.1], noise=0.02)
    balancer = MicroBatchBalancer("1f1b", 4, 64, 16)
    sizes, balancer = run(pipeline, balancer, 40)
    assert len(set(sizes[2:])) == 1
    pipeline.slow = 3.0
    later, _ = run(pipeline, balancer, 40)
    assert set(later) == {sizes[-1]}


def test_it_moves_when_the_fixed_cost_changes():
    pipeline = Pipeline(0.02, [1.0] * 4)
    sizes, balancer = run(pipeline, MicroBatchBalancer("1f1b", 4, 64, 16), 3)
    assert sizes[-1] <= 2
    costly = Pipeline(8.0, [1.0] * 4)
    balancer = balancer.observe(costly.step(16)).observe(costly.step(16)).observe(costly.step(2))
    for _ in range(40):
        balancer = balancer.observe(costly.step(balancer.decide().size))
    assert balancer.size > sizes[-1]


def test_what_cannot_work_says_so():
    with pytest.raises(ConfigError, match="no micro-batch size works"):
        MicroBatchBalancer("1f1b", 8, 4, 4)
    with pytest.raises(ConfigError, match="needs a size and 2 stage times"):
        MicroBatchBalancer("1f1b", 2, 8, 4).observe(Observation(2, (1.0,), (1.0,)))
    with pytest.raises(ConfigError, match="above 0"):
        MicroBatchBalancer("1f1b", 1, 8, 4).observe(Observation(2, (0.0,), (1.0,)))
    with pytest.raises(ConfigError, match="nothing was observed"):
        MicroBatchBalancer("1f1b", 2, 8, 4).predict(2)


def test_thirty_two_uneven_stages_from_23_to_under_7_percent():
    """The shape of Llama 3.1 405B (126 layers, a head of two thirds of one): first 104 micro-batches of 8."""
    costs = [0.01, *[1.0] * 126, 0.66]
    rates = stage_costs(costs, split_layers(costs, 32))
    pipeline = Pipeline(0.05 * sum(rates) / 32, rates)  # 5 % of a sample's time
    balancer = MicroBatchBalancer("1f1b", 32, 832, 8)
    sizes, balancer = run(pipeline, balancer, 3)
    before, after = balancer.predict(sizes[0]), balancer.predict(sizes[2])
    assert before.bubble > 0.23
    assert after.bubble < 0.07
    assert after.makespan < 0.85 * before.makespan
