"""Which tokens are computed next: one rule, no phases, one token budget.

Every step gives each sequence tokens until `num_computed_tokens` reaches `num_tokens`. A prompt in chunks, the next
token of an answer, and an answer that is recomputed after preemption are the same case. Running sequences come first,
in order of admission, and the single token that an answer lacks is never left out; what is left of the budget admits
waiting ones, each key in its turn (`waiting.py`). When blocks run out, the
sequence that was admitted last gives up its blocks and waits at the front: the first always advances, so no sequence
starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penjing.serve.engine.blocks import NULL_BLOCK, BlockManager
from penjing.serve.engine.sequence import Batch, Sequence, SequenceChunk
from penjing.serve.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from penjing.core.models.config import DecoderConfig

RESERVED_PART = 8  # one of so many places is left to other keys, so that they need not wait for an answer to end
MAX_SCORED_TOKENS = 128  # of a prompt whose tokens are scored, in a step: their logits take 200 kB each


class Scheduler:
    """Decides batches; pure Python, no tensors. Blocks before `window`, of `largest_window`, are released."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_sequences: int,
        watermark: float = 0.0,
        window: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_sequences = max_num_sequences
        self.watermark_blocks = int(watermark * blocks.num_usable)
        self.window = window
        self.running: list[Sequence] = []  # in order of admission
        self.waiting = WaitingQueue()
        self.num_waiting_tokens = 0
        self.num_held_forks = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, forks that wait for their parent's prompt included."""
        return len(self.waiting) + self.num_held_forks

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks a sequence of `num_tokens` holds at once."""
        whole = self.blocks.blocks_for(num_tokens)
        if self.window is None:
            return whole
        # The window and a step's chunk, each of which may begin and end inside a block.
        return min(whole, self.blocks.blocks_for(self.window + self.max_num_batched_tokens) + 1)

    def add(self, sequence: Sequence) -> None:
        """Queue `sequence`; its forks follow when its prompt is computed. It must fit the cache by itself."""
        assert self.peak_blocks(sequence.num_tokens) <= self.blocks.num_usable, "validated before it is queued"
        self.waiting.add(sequence)
        self.num_waiting_tokens += sequence.num_tokens
        self.num_held_forks += len(sequence.forks)

    def num_answering(self) -> int:
        """Running sequences that only lack their next token."""
        return sum(sequence.num_computed_tokens + 1 == len(sequence.token_ids) for sequence in self.running)

    def schedule(self, prompt_tokens: int | None = None, drafts: Mapping[Sequence, list[int]] | None = None) -> Batch:
        """The next step's batch; empty only when there is no work.

        Args:
            prompt_tokens: at most so many are of prompts (or of answers that are computed again), at least 1; None: as
                many as the step can take. The next token of each running answer comes first.
            drafts: guesses behind the last token of running answers. They get what is left of budget and blocks; those
                that do are the `draft` of their sequence until `settle`.
        """
        chunks: list[SequenceChunk] = []
        num_preemptions, running, blocks = self.num_preemptions, self.running, self.blocks
        budget = self.max_num_batched_tokens - self.num_answering()
        if prompt_tokens is not None:
            budget = min(budget, prompt_tokens)
        # What waits for another key than the prompt that runs gets half of the budget.
        first = self.waiting.first(self._full_keys()) if self.waiting else None
        kept = 0
        if first is not None and first.key and len(running) < self.max_num_sequences:
            kept = 0 if any(s.key == first.key for s in running) else budget // 2
        budget -= kept
        index = 0
        while index < len(running):
            sequence = running[index]
            computed = sequence.num_computed_tokens
            missing = len(sequence.token_ids) - computed
            assert missing > 0, f"{sequence!r} runs with nothing to compute"
            num_tokens = 1 if missing == 1 else min(missing, budget, self._most_of(sequence))
            if num_tokens == 0:  # its turn comes when the prompts before it are computed
                index += 1
                continue
            if not blocks.grow(sequence, computed + num_tokens):
                # Victims come from the end, so none of them is in this batch yet.
                self._preempt(running.pop())
                continue
            chunks.append(SequenceChunk(sequence, num_tokens))
            budget -= num_tokens if missing > 1 else 0
            index += 1
        if self.waiting and self.num_preemptions == num_preemptions:
            self._admit(chunks, budget + kept)
        num_tokens = sum(num_tokens for _, num_tokens in chunks)
        if drafts:
            num_tokens += self._take_drafts(chunks, drafts, self.max_num_batched_tokens - num_tokens)
        return Batch(chunks, num_tokens)

    def _take_drafts(self, chunks: list[SequenceChunk], drafts: Mapping[Sequence, list[int]], budget: int) -> int:
        """How many tokens of `drafts` the step computes besides."""
        blocks, taken = self.blocks, 0
        for sequence, num_tokens in chunks:
            draft = drafts.get(sequence)
            if draft is None or sequence.num_computed_tokens + num_tokens < sequence.num_tokens:
                continue
            draft = draft[: budget - taken]
            if not blocks.grow(sequence, sequence.num_tokens + len(draft)):
                draft = draft[: len(sequence.block_table) * blocks.block_size - sequence.num_tokens]
            sequence.draft = draft
            taken += len(draft)
        return taken

    def settle(self, sequence: Sequence) -> None:
        """The step is over: what its draft did not gain is forgotten."""
        sequence.draft = []
        self.blocks.trim(sequence)

    def _most_of(self, sequence: Sequence) -> int:
        return MAX_SCORED_TOKENS if sequence.scores_prompt else self.max_num_batched_tokens

    def advance(self, batch: Batch) -> None:
        """The tokens of `batch` are in the KV cache: publish full blocks, release forks and what left the window."""
        for sequence, num_tokens in batch.chunks:
            sequence.num_computed_tokens += num_tokens
            self.blocks.publish(sequence)
            if self.window is not None:
                self._release_outside_window(sequence)
            if sequence.forks and sequence.num_computed_tokens >= sequence.num_prompt_tokens:
                self._release_forks(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take `sequence` out, wherever it is; its blocks are free afterwards."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.charge(sequence, sequence.num_output_tokens)
        elif self.waiting.remove(sequence):
            self.num_waiting_tokens -= sequence.num_tokens
        elif sequence.fork_of is not None and sequence in sequence.fork_of.forks:
            sequence.fork_of.forks.remove(sequence)
            self.num_held_forks -= 1
        self.blocks.release(sequence)
        if sequence.forks:
            self._release_forks(sequence)

    def _admit(self, chunks: list[SequenceChunk], budget: int) -> None:
        blocks = self.blocks
        # Blocks that running sequences still need for tokens they already have.
        promised = sum(self._missing_blocks(sequence) for sequence in self.running)
        full = self._full_keys()
        while budget > 0 and len(self.running) < self.max_num_sequences:
            sequence = self.waiting.first(full)
            if sequence is None:
                break
            shared = self._shared_prefix(sequence)
            available = blocks.num_free - promised - (self.watermark_blocks if self.running else 0)
            if self._new_blocks(sequence, shared) + blocks.count_free(shared) > available:
                break
            self.waiting.take(sequence)
            self.num_waiting_tokens -= sequence.num_tokens
            blocks.adopt(sequence, shared)
            num_shared = sequence.num_computed_tokens
            if sequence.num_output_tokens == 0:
                sequence.num_cached_tokens = num_shared
                self.prefix_queries += sequence.num_tokens
                self.prefix_hits += num_shared
            num_tokens = min(sequence.num_tokens - num_shared, budget, self._most_of(sequence))
            grown = blocks.grow(sequence, num_shared + num_tokens)
            assert grown, "counted above"
            chunks.append(SequenceChunk(sequence, num_tokens))
            budget -= num_tokens
            self.running.append(sequence)
            promised += self._missing_blocks(sequence)
            full = self._full_keys()

    def _full_keys(self) -> list[str]:
        """Keys that hold as many of the running sequences as one may; those that have no name share all."""
        most = self.max_num_sequences - self.max_num_sequences // RESERVED_PART
        running = Counter(sequence.key for sequence in self.running if sequence.key)
        return [key for key, count in running.items() if count >= most]

    def _missing_blocks(self, sequence: Sequence) -> int:
        return self._new_blocks(sequence, sequence.block_table)

    def _new_blocks(self, sequence: Sequence, table: list[int]) -> int:
        """Blocks that `sequence` needs beyond `table` for the tokens it has, those it gives up meanwhile counted
        off."""
        num_tokens = sequence.num_tokens
        if self.window is None:
            return self.blocks.blocks_for(num_tokens) - len(table)
        held = len(table) - table.count(NULL_BLOCK)
        return min(self.blocks.blocks_for(num_tokens) - len(table), self.peak_blocks(num_tokens) - held)

    def _shared_prefix(self, sequence: Sequence) -> list[int]:
        """Computed blocks that `sequence` can start from: its parent's if it is a fork, else those of the cache."""
        if sequence.scores_prompt:  # what is found in the cache has no logits
            return []
        parent = sequence.fork_of
        if parent is not None:
            # The last token is always computed, since its logits are wanted.
            count = min(parent.num_computed_tokens, parent.num_prompt_tokens, sequence.num_tokens - 1)
            count //= self.blocks.block_size
            if count > 0 and parent.num_windowed_blocks <= self._num_outside_window(count):
                return self._without_windowed(parent.block_table[:count])
        return self._without_windowed(self.blocks.find_prefix(sequence))

    def _num_outside_window(self, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks the query that follows them no longer sees."""
        if self.window is None:
            return 0
        return max(0, num_blocks * self.blocks.block_size - self.window + 1) // self.blocks.block_size

    def _without_windowed(self, shared: list[int]) -> list[int]:
        outside = self._num_outside_window(len(shared))
        return [NULL_BLOCK] * outside + shared[outside:] if outside else shared

    def _release_outside_window(self, sequence: Sequence) -> None:
        assert self.window is not None
        # The next query is at num_computed_tokens and sees `window` keys, itself included.
        self.blocks.release_before(sequence, max(0, sequence.num_computed_tokens - self.window + 1))

    def _release_forks(self, sequence: Sequence) -> None:
        for fork in reversed(sequence.forks):
            self.waiting.add_in_front(fork)
            self.num_waiting_tokens += fork.num_tokens
        self.num_held_forks -= len(sequence.forks)
        sequence.forks = []

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        self.waiting.add_in_front(sequence)
        self.num_waiting_tokens += sequence.num_tokens
        self.num_preemptions += 1


def largest_window(model: DecoderConfig) -> int | None:
    """Tokens that some layer still sees, when every layer has a window or a short convolution; else None."""
    windows = [
        model.conv_taps if model.is_conv(layer) else model.layer_window(layer)
        for layer in range(model.num_hidden_layers)
    ]
    bounded = [window for window in windows if window is not None]
    return max(bounded) if len(bounded) == len(windows) else None
