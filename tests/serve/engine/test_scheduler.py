"""Scheduling policies and the bug history of small engines, each bug a test that fails if it returns."""

from __future__ import annotations

from penjing.serve.engine.blocks import chain_hash
from penjing.serve.engine.invariants import Snapshot, check_invariants
from penjing.serve.engine.sequence import Batch, Sequence
from tests.serve.harness import Harness, Setup, expected_answer


def answer_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]


def test_144_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    """nano-vllm #144: a full hit left a sequence of length 0 to compute."""
    harness = Harness(Setup(block_size=4))
    prompt = [0, 1, 2, 0, 1, 2, 0, 1]
    harness.add(prompt, 3)
    harness.drain()
    (again,) = harness.add(prompt, 3)
    batch = harness.step()
    assert again.num_cached_tokens == 4, "the second block holds the last token: it is computed again"
    assert [chunk.num_tokens for chunk in batch.chunks] == [4]
    harness.drain()


def test_163_a_reused_block_is_not_found_by_the_text_it_held_before() -> None:
    """nano-vllm #163: a stale hash led to a block with other content."""
    harness = Harness(Setup(num_blocks=4, block_size=4))
    first, second = [0] * 9, [1] * 9
    harness.add(first, 1)
    harness.drain()
    harness.add(second, 1)  # needs all three blocks: evicts what `first` left
    harness.drain()
    (again,) = harness.add(first, 1)
    harness.drain()
    assert again.num_cached_tokens == 0
    assert answer_of(again) == expected_answer(first, 1)


def test_163_equal_tokens_after_another_prefix_are_another_block() -> None:
    harness = Harness(Setup(num_blocks=20, block_size=2))
    harness.add([0, 0, 2, 2, 1], 1)
    harness.drain()
    (other,) = harness.add([1, 1, 2, 2, 1], 1)
    harness.drain()
    assert other.num_cached_tokens == 0
    assert chain_hash(chain_hash(b"", [0, 0]), [2, 2]) != chain_hash(chain_hash(b"", [1, 1]), [2, 2])


def test_211_233_a_preempted_sequence_that_hits_its_own_blocks_stays_in_bounds() -> None:
    """nano-vllm #211 and #233: hits after preemption counted tokens and blocks that the sequence did not have."""
    harness = Harness(Setup(num_blocks=8, block_size=2, max_num_sequences=2))
    old, young = harness.add([0, 1, 2], 8)[0], harness.add([0, 1, 1], 8)[0]
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert harness.scheduler.waiting.first() is young
    assert young.num_output_tokens > 0
    while young not in harness.scheduler.running:
        harness.step()
        harness.check()
    assert young.num_computed_tokens <= young.num_tokens
    harness.drain()
    assert answer_of(young) == expected_answer([0, 1, 1], 8)
    assert answer_of(old) == expected_answer([0, 1, 2], 8)


def test_219_243_equal_prompts_in_one_step_do_not_share_what_is_not_computed() -> None:
    """nano-vllm #219 and #243: the second of two equal prompts hit the blocks of the first in the step that computes
    them, and both published one digest."""
    harness = Harness(Setup(num_blocks=20, block_size=2, max_num_batched_tokens=64))
    twins = [harness.add([0, 1, 2, 0, 1], 4)[0] for _ in range(3)]
    batch = harness.step()
    assert len(batch.chunks) == 3
    assert all(twin.num_cached_tokens == 0 for twin in twins)
    assert len({block for twin in twins for block in twin.block_table}) == 9, "each has blocks of its own"
    assert len(harness.blocks.by_hash) == 2, "one of them is the cached one"
    harness.check()
    harness.drain()
    harness.add([0, 1, 2, 0, 1], 1)
    harness.step()
    assert harness.scheduler.prefix_hits == 4


def test_a_running_answer_gets_its_token_beside_a_long_prompt() -> None:
    harness = Harness(Setup(num_blocks=40, block_size=4, max_num_batched_tokens=8))
    (answer,) = harness.add([0, 1], 20)
    harness.step()
    (prompt,) = harness.add([1] * 50, 1)
    for _ in range(5):
        before = answer.num_output_tokens
        batch = harness.step()
        assert answer.num_output_tokens == before + 1
        assert [(chunk.sequence is prompt, chunk.num_tokens) for chunk in batch.chunks] == [(False, 1), (True, 7)]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    """A short prompt would fit now; it waits behind the long one, which would otherwise starve."""
    harness = Harness(Setup(num_blocks=9, block_size=4, max_num_batched_tokens=32))
    harness.add([0] * 12, 9)
    harness.step()
    (long,) = harness.add([1] * 20, 4)
    (short,) = harness.add([2], 4)
    harness.step()
    assert list(harness.scheduler.waiting) == [long, short]
    harness.drain()


def test_admission_leaves_the_blocks_that_a_prompt_in_chunks_still_needs() -> None:
    harness = Harness(Setup(num_blocks=11, block_size=4, max_num_batched_tokens=4))
    harness.add([0] * 30, 2)
    harness.step()
    harness.add([1] * 8, 2)
    while harness.goals:
        harness.step()
    assert harness.scheduler.num_preemptions == 0


def test_the_watermark_keeps_blocks_for_running_answers() -> None:
    def preemptions(watermark: float) -> int:
        harness = Harness(Setup(num_blocks=41, block_size=4, max_num_sequences=30, watermark=watermark))
        for i in range(30):
            harness.add([i % 3, i // 3 % 3, i // 9 % 3], 10)
        harness.drain()
        return harness.scheduler.num_preemptions

    assert preemptions(0.0) > 0
    assert preemptions(0.4) < preemptions(0.0)


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    harness = Harness(Setup(num_blocks=7, block_size=2, max_num_sequences=4))
    for token in range(3):
        harness.add([token], 7)
    admitted: list[Sequence] = []
    batch = Batch([], 0)
    while not harness.scheduler.num_preemptions:
        admitted = list(harness.scheduler.running)
        batch = harness.step()
    assert all(chunk.sequence in admitted for chunk in batch.chunks)
    harness.drain()


def test_forks_share_the_full_blocks_of_the_prompt() -> None:
    for caching in (True, False):
        harness = Harness(Setup(num_blocks=40, block_size=4, max_num_sequences=8, enable_prefix_caching=caching))
        first, *forks = harness.add([0, 1, 2, 0, 1, 2, 0, 1, 2, 0], 6, n=4)
        harness.step()
        harness.step()
        assert len(harness.scheduler.running) == 4
        for fork in forks:
            assert fork.block_table[:2] == first.block_table[:2]
            assert fork.block_table[2] != first.block_table[2]
        assert harness.blocks.num_usable - harness.blocks.num_free == 2 + 4
        harness.drain()


def test_a_window_bounds_the_blocks_of_a_long_answer() -> None:
    harness = Harness(Setup(num_blocks=9, block_size=4, window=6, max_num_batched_tokens=8))
    (sequence,) = harness.add([0, 1] * 20, 60)
    most = 0
    while harness.goals:
        harness.step()
        harness.check()
        most = max(most, harness.blocks.num_usable - harness.blocks.num_free)
    assert sequence.num_tokens == 100, "25 blocks of tokens went through 8 blocks"
    assert most <= 5


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_prefix_first() -> None:
    harness = Harness(Setup(num_blocks=7, block_size=2))
    old, new = [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]  # two full blocks and one in part, which is blank again afterwards
    for prompt in (old, new, old):
        harness.add(prompt, 1)
        harness.drain()
    # Four blocks are cached, two are blank; this takes three.
    harness.add([2, 2, 2, 2, 2], 1)
    harness.drain()
    manager = harness.blocks
    assert len(manager.find_prefix(Sequence("old", old))) == 2, "used last"
    assert len(manager.find_prefix(Sequence("new", new))) == 1, "its second block went, its first stays"


def test_each_invariant_is_noticed_when_broken() -> None:
    def broken(damage: str) -> str:
        harness = Harness(Setup(num_blocks=12, block_size=2))
        harness.add([0, 1, 2, 0, 1], 1)
        harness.drain()
        harness.add([1, 1, 1], 5)
        harness.add([2, 1, 1], 5)
        harness.step()
        harness.add([0], 2)
        manager, scheduler = harness.blocks, harness.scheduler
        running = scheduler.running[0]
        cached = next(iter(manager.free_cached))
        actions = {
            "references": lambda: manager.ref_counts.__setitem__(running.block_table[0], 2),
            "disagree": lambda: manager.free_blank.pop(),
            "twice in the blank": lambda: manager.free_blank.append(manager.free_blank[0]),
            "blank and cached": lambda: manager.free_blank.append(cached),
            "blank block is published": lambda: manager.hashes.__setitem__(manager.free_blank[0], b"x"),
            "cached block has no digest": lambda: manager.hashes.__setitem__(cached, None),
            "not its own": lambda: manager.by_hash.__setitem__(b"x", cached),
            "published with": lambda: manager.tokens.__setitem__(cached, (1,)),
            "queued twice": lambda: scheduler.running.append(running),
            "num_waiting_tokens": lambda: setattr(scheduler, "num_waiting_tokens", 9),
            "num_held_forks": lambda: setattr(scheduler, "num_held_forks", 1),
            "waits and holds": lambda: setattr(scheduler.waiting.first(), "num_computed_tokens", 1),
            "more tokens than it has": lambda: setattr(running, "num_computed_tokens", 99),
            "without a block": lambda: running.block_table.clear(),
            "outside the window": lambda: setattr(running, "num_windowed_blocks", 1),
            "published for other tokens": lambda: running.token_ids.__setitem__(0, 2),
            "may": lambda: setattr(scheduler, "max_num_sequences", 1),
        }
        assert check_invariants(Snapshot.of(scheduler)) == []
        actions[damage]()
        return "; ".join(check_invariants(Snapshot.of(scheduler)))

    for damage in (
        "references", "disagree", "twice in the blank", "blank and cached", "blank block is published",
        "cached block has no digest", "not its own", "published with", "queued twice", "num_waiting_tokens",
        "num_held_forks", "waits and holds", "more tokens than it has", "without a block", "outside the window",
        "published for other tokens", "may",
    ):  # fmt: skip
        assert damage in broken(damage)
