"""A state machine over scheduler and block manager: random requests, steps, cancellations and failures, every invariant
after every operation, every answer compared, nothing leaked at the end."""

from __future__ import annotations

from random import Random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.serve.harness import NUM_TOKENS, Harness, Setup

BURST = 60  # random operations in one rule: hypothesis itself costs more than an operation

setups = st.builds(
    Setup,
    num_blocks=st.integers(4, 24),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    max_num_batched_tokens=st.integers(6, 24),
    max_num_sequences=st.integers(1, 6),
    watermark=st.sampled_from([0.0, 0.05, 0.3]),
    window=st.sampled_from([None, None, 1, 3, 8]),
    enable_prefix_caching=st.sampled_from([True, True, False]),
)


class SchedulerMachine(RuleBasedStateMachine):
    num_operations: ClassVar[int] = 0
    num_preemptions: ClassVar[int] = 0
    num_hits: ClassVar[int] = 0
    num_accepted: ClassVar[int] = 0

    harness: Harness

    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.harness = Harness(setup)

    @rule(seed=st.integers(0, 2**32))
    def add(self, seed: int) -> None:
        self._add(Random(seed))

    @rule(prompt_tokens=st.none() | st.integers(1, 20), seed=st.none() | st.integers(0, 2**32))
    def step(self, prompt_tokens: int | None, seed: int | None) -> None:
        self._step(prompt_tokens, None if seed is None else Random(seed))

    @rule(victim=st.integers(0, 7))
    def abort(self, victim: int) -> None:
        self._abort(victim)

    @rule(victim=st.integers(0, 7))
    def failed_step(self, victim: int) -> None:
        self._failed_step(victim)

    @rule(seed=st.integers(0, 2**32))
    def burst(self, seed: int) -> None:
        random = Random(seed)
        for _ in range(BURST):
            choice = random.random()
            if choice < 0.25 and len(self.harness.goals) < 12:
                self._add(random)
            elif choice < 0.90:
                self._step(random.choice([None, 1, 3, 7]), random.choice([None, random]))
            elif choice < 0.96:
                self._abort(random.randrange(8))
            else:
                self._failed_step(random.randrange(8))
            self.harness.check()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            SchedulerMachine.num_preemptions += self.harness.scheduler.num_preemptions
            SchedulerMachine.num_hits += self.harness.scheduler.prefix_hits
            SchedulerMachine.num_accepted += self.harness.num_accepted

    def _add(self, random: Random) -> None:
        setup = self.harness.setup
        longest = min(40, (setup.num_blocks - 1) * setup.block_size)
        length = random.randint(1, max(1, longest - 1))
        # Constant beginnings make prefixes shared; the first tokens alone decide whether they are.
        prompt = [0] * random.randint(0, length) + [random.randrange(NUM_TOKENS) for _ in range(length)]
        num_output_tokens = random.randint(1, max(1, longest - length))
        if self.harness.fits(length + num_output_tokens):
            n, key, priority = random.choice([1, 1, 1, 2, 4]), random.choice(["", "a", "b"]), random.choice([0, 0, 1])
            self.harness.add(prompt[:length], num_output_tokens, n, key, priority)
        self._count()

    def _step(self, prompt_tokens: int | None, random: Random | None) -> None:
        self.harness.step(prompt_tokens, random)
        self._count()

    def _abort(self, victim: int) -> None:
        sequences = list(self.harness.goals)
        if sequences:
            self.harness.finish(sequences[victim % len(sequences)])
        self._count()

    def _failed_step(self, victim: int) -> None:
        self.harness.failed_step(victim)
        self._count()

    @staticmethod
    def _count() -> None:
        SchedulerMachine.num_operations += 1


def run_machine(num_examples: int) -> None:
    SchedulerMachine.num_operations = SchedulerMachine.num_preemptions = 0
    SchedulerMachine.num_hits = SchedulerMachine.num_accepted = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


def test_30_000_random_operations_keep_every_invariant_and_leak_nothing() -> None:
    run_machine(180)
    assert SchedulerMachine.num_operations >= 30_000
    # 670 to 1,960 in 100,000: hypothesis draws numbers of modules too, so that it matters which are imported.
    assert SchedulerMachine.num_preemptions > 60, "the machine must reach preemption"
    assert SchedulerMachine.num_hits > 300, "the machine must reach prefix hits"
    assert SchedulerMachine.num_accepted > 300, "the machine must reach guesses that come true"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_1_000_000_random_operations() -> None:
    run_machine(3000)
    assert SchedulerMachine.num_operations >= 1_000_000
