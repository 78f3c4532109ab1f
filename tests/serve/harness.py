"""Scheduler and block manager driven without a model: the KV cache is a list that remembers which text each slot holds.

Every slot stores a key of all tokens up to its own, as keys and values of a real model depend on them. A step checks
that each computed token sees, in every slot of its context, the key that its own text asks for: a stale, shared or
freed block shows at once. Which number comes next is a function of the text, so that whole answers can be compared too.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass
from random import Random

from penjing.serve.engine.blocks import BlockManager
from penjing.serve.engine.invariants import Snapshot, check_invariants
from penjing.serve.engine.scheduler import Scheduler
from penjing.serve.engine.sequence import Batch, Sequence, SequenceChunk

NUM_TOKENS = 3  # a small vocabulary, so that different sequences often share their beginnings


@dataclass(frozen=True)
class Setup:
    num_blocks: int = 9
    block_size: int = 4
    max_num_batched_tokens: int = 16
    max_num_sequences: int = 4
    watermark: float = 0.0
    window: int | None = None
    enable_prefix_caching: bool = True


def next_key(key: int, token: int) -> int:
    return hash((key, token))


def expected_answer(prompt: Ids[int], num_output_tokens: int) -> list[int]:
    """What the fake model answers, without any cache."""
    key, answer = 0, []
    for token in prompt:
        key = next_key(key, token)
    for _ in range(num_output_tokens):
        answer.append(key % NUM_TOKENS)
        key = next_key(key, answer[-1])
    return answer


class Harness:
    """Adds, steps and ends sequences as the engine does; `goals` maps those in flight to their final length."""

    def __init__(self, setup: Setup) -> None:
        self.blocks = BlockManager(setup.num_blocks, setup.block_size, setup.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.blocks, setup.max_num_batched_tokens, setup.max_num_sequences, setup.watermark, setup.window
        )
        self.setup = setup
        self.slots: list[int | None] = [None] * (setup.num_blocks * setup.block_size)
        self.goals: dict[Sequence, int] = {}
        self.keys: dict[Sequence, list[int]] = {}
        self.num_added = 0
        self.num_computed = 0
        self.num_accepted = 0

    def fits(self, num_tokens: int) -> bool:
        return self.scheduler.peak_blocks(num_tokens) <= self.blocks.num_usable

    def add(
        self, prompt: Ids[int], num_output_tokens: int, n: int = 1, key: str = "", priority: int = 0
    ) -> list[Sequence]:
        """Queue `n` sequences with one prompt; they must fit the cache one by one."""
        assert self.fits(len(prompt) + num_output_tokens)
        self.num_added += 1
        first = Sequence(f"request-{self.num_added}", list(prompt), key=key, priority=priority)
        first.forks = [Sequence(first.request_id, list(prompt), i, first, key, priority) for i in range(1, n)]
        sequences = [first, *first.forks]
        for sequence in sequences:
            self.goals[sequence] = len(prompt) + num_output_tokens
            self.keys[sequence] = []
        self.scheduler.add(first)
        return sequences

    def step(self, prompt_tokens: int | None = None, random: Random | None = None) -> Batch:
        """One step of the engine: schedule, compute, advance, append, finish. Checks contents and progress.

        With `random`, running answers have drafts, whose tokens are right at times.
        """
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        num_preemptions = self.scheduler.num_preemptions
        answering = {s for s in self.scheduler.running if s.num_computed_tokens + 1 == s.num_tokens}
        drafts = {} if random is None else {s: self._guess(s, random) for s in answering}
        batch = self.scheduler.schedule(prompt_tokens, drafts)
        if self.scheduler.num_preemptions == num_preemptions:
            assert answering <= {chunk.sequence for chunk in batch.chunks}, "no running answer misses its token"
        if prompt_tokens is not None:
            assert sum(n for s, n in batch.chunks if s not in answering) <= prompt_tokens
        if self.scheduler.has_work():
            assert batch.chunks, "work, but nothing is computed"
        if oldest is not None:
            assert batch.chunks[0].sequence is oldest, "the sequence that was admitted first always advances"
        num_drafted = sum(len(chunk.sequence.draft) for chunk in batch.chunks)
        assert batch.num_tokens == num_drafted + sum(chunk.num_tokens for chunk in batch.chunks)
        assert batch.num_tokens <= self.setup.max_num_batched_tokens
        for sequence, num_tokens in batch.chunks:
            self._compute(sequence, num_tokens)
        self.scheduler.advance(batch)
        for sequence, _ in batch.chunks:
            if sequence.num_computed_tokens < sequence.num_tokens:
                continue
            self._take(sequence)
            for guessed in sequence.draft:
                if sequence not in self.goals or sequence.token_ids[-1] != guessed:
                    break
                self.num_accepted += 1
                self.scheduler.advance(Batch([SequenceChunk(sequence, 1)], 1))
                self._take(sequence)
            if sequence in self.goals:
                self.scheduler.settle(sequence)
                held = self.blocks.blocks_for(sequence.num_tokens)
                assert len(sequence.block_table) <= held, "blocks of guesses that did not come are given back"
        return batch

    def _take(self, sequence: Sequence) -> None:
        """Append the next token of the answer, which may be its last."""
        key = self.keys[sequence][sequence.num_computed_tokens - 1]
        sequence.token_ids.append(key % NUM_TOKENS)
        if sequence.num_tokens == self.goals[sequence]:
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert answer == expected_answer(prompt, len(answer))
            self.finish(sequence)

    def _guess(self, sequence: Sequence, random: Random) -> list[int]:
        most = min(self.goals[sequence] - sequence.num_tokens - 1, random.randrange(8))
        right = expected_answer(sequence.token_ids, max(most, 0))
        return [token if random.random() < 0.8 else (token + 1) % NUM_TOKENS for token in right]

    def failed_step(self, victim: int) -> None:
        """The runner fails before anything is computed, because of one sequence, which ends."""
        chunks = self.scheduler.schedule().chunks
        if chunks:
            self.finish(chunks[victim % len(chunks)].sequence)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        del self.goals[sequence], self.keys[sequence]

    def drain(self) -> None:
        """Step until every sequence has its answer; then no block is held."""
        missing = sum(goal - sequence.num_computed_tokens for sequence, goal in self.goals.items())
        # Preemption recomputes, but the first sequence gains a token each step: a bound that only a livelock exceeds.
        for _ in range(2 * missing + 10):
            if not self.scheduler.has_work():
                break
            self.step()
            self.check()
        assert not self.goals, f"{self.goals} never finish"
        assert self.blocks.num_free == self.blocks.num_usable, "blocks leaked"

    def check(self) -> None:
        assert check_invariants(Snapshot.of(self.scheduler)) == []

    def _compute(self, sequence: Sequence, num_tokens: int) -> None:
        size, table, keys = self.blocks.block_size, sequence.block_table, self.keys[sequence]
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        assert 0 < num_tokens <= sequence.num_tokens - start
        assert not sequence.draft or end == sequence.num_tokens
        end += len(sequence.draft)
        token_ids = [*sequence.token_ids, *sequence.draft]
        del keys[start:]
        for position in range(len(keys), end):
            keys.append(next_key(keys[-1] if keys else 0, token_ids[position]))
        for position in range(start, end):
            block = table[position // size]
            assert block != 0, "a token is written to the null block"
            self.slots[block * size + position % size] = keys[position]
        seen_from = 0 if self.setup.window is None else max(0, start - self.setup.window + 1)
        for position in range(seen_from, end):
            slot = table[position // size] * size + position % size
            assert self.slots[slot] == keys[position], f"{sequence!r} sees other text at position {position}"
        self.num_computed += num_tokens
