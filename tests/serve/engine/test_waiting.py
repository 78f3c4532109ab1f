"""Fair share between keys: whose turn it is, how much a turn is worth, and what one key cannot take from another."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from penjing.core.errors import OverloadedError
from penjing.serve.engine.request import Request
from penjing.serve.engine.sequence import Sequence
from penjing.serve.engine.waiting import QUANTUM, WaitingQueue
from penjing.serve.sampling.params import SamplingParams
from tests.serve.harness import Harness, Setup
from tests.serve.tiny import tiny_engine


def waiting(key: str, length: int = 10, priority: int = 0) -> Sequence:
    return Sequence("r", [0] * length, key=key, priority=priority)


def take(queue: WaitingQueue, full: tuple[str, ...] = ()) -> Sequence | None:
    sequence = queue.first(full)
    assert queue.first(full) is sequence, "looking changes nothing"
    if sequence is not None:
        queue.take(sequence)
    return sequence


@pytest.mark.parametrize("seed", range(5))
def test_keys_that_wait_get_equal_shares_of_tokens(seed: int) -> None:
    random, queue = Random(seed), WaitingQueue()
    longest = {"short": 30, "long": 2000, "other": 400}
    for key, most in longest.items():
        for _ in range(60_000 // most):
            queue.add(waiting(key, random.randint(1, most)))
    served: Counter[str] = Counter()
    for _ in range(200):
        sequence = take(queue)
        assert sequence is not None
        served[sequence.key] += sequence.num_tokens
        if all(queue.num_of(key) for key in longest):
            assert max(served.values()) - min(served[key] for key in longest) <= QUANTUM + max(longest.values())


def test_a_key_that_begins_to_wait_is_next() -> None:
    queue = WaitingQueue()
    for _ in range(500):
        queue.add(waiting("many", 128))
    for _ in range(20):
        take(queue)
    one = waiting("one", 128)
    queue.add(one)
    assert take(queue) is one
    twice = [waiting("twice", 128) for _ in range(20)]
    for sequence in twice:
        queue.add(sequence)
    taken = [take(queue) in twice for _ in range(24)]
    assert taken[: QUANTUM // 128] == [True] * (QUANTUM // 128), "a turn of its own, at once"
    assert sum(taken[QUANTUM // 128 :]) <= 12, "then turn by turn"


def test_a_prompt_of_one_key_leaves_half_of_a_step_to_another_key() -> None:
    harness = Harness(Setup(num_blocks=200, block_size=4, max_num_batched_tokens=32, max_num_sequences=8))
    (long,) = harness.add([0] * 150, 1, key="long")
    harness.step()
    harness.add([1] * 12, 1, key="short")
    batch = harness.step()
    assert [(chunk.sequence is long, chunk.num_tokens) for chunk in batch.chunks] == [(True, 16), (False, 12)]
    harness.drain()


def test_generated_tokens_are_charged_too() -> None:
    queue = WaitingQueue()
    for _ in range(100):
        queue.add(waiting("talkative"))
        queue.add(waiting("brief"))
    served: Counter[str] = Counter()
    for _ in range(80):
        sequence = take(queue)
        assert sequence is not None
        served[sequence.key] += 1
        queue.charge(sequence, 300 if sequence.key == "talkative" else 0)
    assert served["brief"] > 5 * served["talkative"] > 0


def test_the_more_urgent_come_first_and_what_ran_before_all() -> None:
    queue = WaitingQueue()
    late, soon, again, usual = waiting("a", priority=3), waiting("a", priority=-2), waiting("b"), waiting("a")
    for sequence in (late, usual, soon):
        queue.add(sequence)
    queue.add_in_front(again)
    assert list(queue) == [again, soon, usual, late]
    assert len(queue) == 4
    assert [take(queue) for _ in range(5)] == [again, soon, usual, late, None]
    assert len(queue) == 0


def test_full_keys_are_passed_over_and_those_who_leave_are_gone() -> None:
    queue = WaitingQueue()
    a, b, c = waiting("a"), waiting("b"), waiting("a", priority=1)
    for sequence in (a, b, c):
        queue.add(sequence)
    assert take(queue, ("a",)) is b
    assert take(queue, ("a",)) is None
    assert queue.remove(a)
    assert not queue.remove(a)
    assert not queue.remove(b)
    assert take(queue) is c
    assert len(queue) == 0


def test_a_key_leaves_places_to_others() -> None:
    harness = Harness(Setup(num_blocks=200, block_size=4, max_num_batched_tokens=64, max_num_sequences=8))
    for _ in range(20):
        harness.add([0, 1], 30, key="many")
    harness.step()
    assert len(harness.scheduler.running) == 7
    (one,) = harness.add([1, 1], 3, key="one")
    harness.step()
    assert one in harness.scheduler.running
    harness.drain()
    for _ in range(20):
        harness.add([0, 1], 3)
    harness.step()
    assert len(harness.scheduler.running) == 8, "those without a name share all places"
    harness.drain()


def test_a_key_cannot_fill_the_queue() -> None:
    engine = tiny_engine(max_num_sequences=1, max_waiting_requests=16)
    params = SamplingParams(max_tokens=5)
    for number in range(14):
        engine.add(Request(f"many {number}", [1, 2], params, key="many"))
    with pytest.raises(OverloadedError, match="14 sequences of this key wait, and 2 places of 16 are left to others"):
        engine.add(Request("many", [1, 2], params, key="many"))
    engine.add(Request("one", [1, 2], params, key="one"))
    assert engine.stats().num_requests_waiting == 15
