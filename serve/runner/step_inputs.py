"""The numbers that describe a step to the model, in buffers allocated once: of the host, pinned or not, or a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from penjing.serve.engine.sequence import NO_ADAPTER, Batch, Sequence
from penjing.serve.runner.seen import SeenRows

ALIGN = 4  # words of int32: views begin at 16 bytes, which kernels find faster to read


class StepTensors(NamedTuple):
    """What a step of T tokens of S sequences reads; R rows want logits."""

    token_ids: torch.Tensor
    """(T,) int32."""
    positions: torch.Tensor
    """(T,) int32."""
    slots: torch.Tensor
    """(T,) int64, see `kernels.kv_cache`."""
    cu_query: torch.Tensor
    """(S + 1,) int32."""
    context_len: torch.Tensor
    """(S,) int32."""
    block_table: torch.Tensor
    """(S, B) int32."""
    logit_rows: torch.Tensor
    """(R,) int32."""


class StepBuffers:
    """Room for the largest step; all but the block table lie in one piece, so that one copy moves them."""

    def __init__(
        self, max_tokens: int, max_sequences: int, num_table_blocks: int, device: str = "cpu", pinned: bool = False
    ) -> None:
        lengths = (2 * max_tokens, max_tokens, max_tokens, max_sequences + 1, max_sequences, max_tokens)
        sizes = [-(-length // ALIGN) * ALIGN for length in lengths]
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pinned)
        slots, self.token_ids, self.positions, self.cu_query, self.context_len, self.logit_rows = self._numbers.split(
            sizes
        )
        self.slots = slots.view(torch.int64)
        self.block_table = torch.zeros(
            (max_sequences, num_table_blocks), dtype=torch.int32, device=device, pin_memory=pinned
        )

    def first(self, num_tokens: int, num_sequences: int, num_logits: int) -> StepTensors:
        """Views of what a step of these sizes reads."""
        return StepTensors(
            self.token_ids[:num_tokens],
            self.positions[:num_tokens],
            self.slots[:num_tokens],
            self.cu_query[: num_sequences + 1],
            self.context_len[:num_sequences],
            self.block_table[:num_sequences],
            self.logit_rows[:num_logits],
        )

    def copy_(self, source: StepBuffers, num_sequences: int) -> None:
        """Take over the numbers of a step of so many sequences; from pinned memory the host does not wait."""
        self._numbers.copy_(source._numbers, non_blocking=True)
        self.block_table[:num_sequences].copy_(source.block_table[:num_sequences], non_blocking=True)


class StepInputs:
    """Writes batches into `buffers`, which belong to the host; steps change only what they must."""

    def __init__(
        self,
        max_tokens: int,
        max_sequences: int,
        max_model_len: int,
        block_size: int,
        pinned: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self.seen = SeenRows(vocab_size)
        """Rows of images that stand in place of tokens of the last batch."""
        self.buffers = StepBuffers(max_tokens, max_sequences, -(-max_model_len // block_size), pinned=pinned)
        self.block_size = block_size
        self.adapter = torch.full((max_tokens,), NO_ADAPTER, dtype=torch.int32)
        """(T,) the adapter's slot of each row, where `has_adapters`."""
        self.has_adapters = False
        """Whether a row of the last batch has one."""
        self._adapter = self.adapter.numpy()
        self._token_ids, self._positions = self.buffers.token_ids.numpy(), self.buffers.positions.numpy()
        self._slots, self._cu_query = self.buffers.slots.numpy(), self.buffers.cu_query.numpy()
        self._context_len, self._logit_rows = self.buffers.context_len.numpy(), self.buffers.logit_rows.numpy()
        self._block_table = self.buffers.block_table.numpy()
        # What each row of the block table holds: sequence, version and length. Steps mostly append to it.
        self._table_rows: list[tuple[Sequence | None, int, int]] = [(None, 0, 0)] * max_sequences

    def fill(self, batch: Batch) -> list[Sequence]:
        """Write the step's inputs into the buffers; for each row whose logits are wanted, in order, its sequence: a
        prompt that is scored has several, and so has an answer with a draft."""
        size, ready = self.block_size, []
        token_ids, positions, slots = self._token_ids, self._positions, self._slots
        row, chunks = 0, batch.chunks
        self.seen.clear()
        self.has_adapters = any(sequence.adapter != NO_ADAPTER for sequence, _ in chunks)
        if self.has_adapters:  # those of one adapter beside each other: its matrices are read once
            chunks = sorted(chunks, key=lambda chunk: chunk.sequence.adapter)
        for i, (sequence, num_tokens) in enumerate(chunks):
            start = sequence.num_computed_tokens
            end = start + num_tokens
            last = end == len(sequence.token_ids)
            if sequence.draft:
                token_ids[row + num_tokens : row + num_tokens + len(sequence.draft)] = sequence.draft
                end += len(sequence.draft)
                num_tokens += len(sequence.draft)
            if self.has_adapters:
                self._adapter[row : row + num_tokens] = sequence.adapter
            if num_tokens == 1:
                token_ids[row] = sequence.token_ids[start]
                positions[row] = start
                slots[row] = sequence.block_table[start // size] * size + start % size
            else:
                position = np.arange(start, end)
                given = sequence.token_ids[start:end]
                token_ids[row : row + len(given)] = given
                positions[row : row + num_tokens] = position
                first = start // size
                blocks = np.array(sequence.block_table[first : (end - 1) // size + 1], dtype=np.int64)
                slots[row : row + num_tokens] = blocks[position // size - first] * size + position % size
            if sequence.images:
                self.seen.fill(sequence, start, token_ids[row : row + num_tokens])
            row += num_tokens
            self._cu_query[i + 1] = row
            self._context_len[i] = end
            self._fill_table_row(i, sequence)
            if sequence.scores_prompt:
                first = max(start, sequence.score_from - 1)
                for position in range(first, min(end, sequence.num_prompt_tokens - 1)):
                    self._logit_rows[len(ready)] = row - end + position
                    ready.append(sequence)
            if last:
                for behind in range(len(sequence.draft) + 1):
                    self._logit_rows[len(ready)] = row - 1 - len(sequence.draft) + behind
                    ready.append(sequence)
        return ready

    def pad(self, num_sequences: int, padded: int) -> None:
        """After `fill` with a token a sequence: add rows up to `padded` that write nothing and read the null block."""
        rows = slice(num_sequences, padded)
        self._token_ids[rows] = self._positions[rows] = 0
        self._slots[rows] = -1
        self._cu_query[num_sequences + 1 : padded + 1] = np.arange(num_sequences + 1, padded + 1)
        self._context_len[rows] = 1
        self._block_table[rows, 0] = 0
        self._table_rows[rows] = [(None, 0, 0)] * (padded - num_sequences)

    def _fill_table_row(self, i: int, sequence: Sequence) -> None:
        table = sequence.block_table
        owner, version, length = self._table_rows[i]
        if owner is not sequence or version != sequence.table_version:
            length = 0
        if length < len(table):
            self._block_table[i, length : len(table)] = table[length:]
        self._table_rows[i] = (sequence, sequence.table_version, len(table))
