"""Runs a batch through the model: the one file of a step that touches tensors."""

from __future__ import annotations

import numpy as np
import torch

from penjing.core.fused import fuse_decoder
from penjing.core.models.decoder import Decoder
from penjing.core.models.latent_attention import pad_values
from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention
from penjing.serve.config import KvDtype
from penjing.serve.kv_pool import allocate_pool
from penjing.serve.sampler import Scores
from penjing.serve.sequence import Batch, Sequence


class Runner:
    """A decoder with its KV cache and the input buffers of a step, which are allocated once.

    The decoder's rows must not depend on the batch (`core.batch_invariant`, `core.quantized`): then neither does
    anything that this class computes.
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_sequences: int,
        max_model_len: int,
        kv_dtype: KvDtype = "float32",
    ) -> None:
        self.block_size = block_size
        self.fused = fuse_decoder(model)  # the whole step in one call; None: the model's own layers on torch
        self.model = model if self.fused is None else None  # the fused step has packed weights of its own
        self.kv_pool, self.kv_scale = allocate_pool(model.config, num_blocks, block_size, kv_dtype)
        self._scale = model.config.head_dim**-0.5
        self._windows = [model.config.layer_window(layer) for layer in range(model.config.num_hidden_layers)]
        self._token_ids = np.zeros(max_tokens, dtype=np.int32)
        self._positions = np.zeros(max_tokens, dtype=np.int32)
        self._slots = np.zeros(max_tokens, dtype=np.int64)
        self._cu_query = np.zeros(max_sequences + 1, dtype=np.int32)
        self._context_len = np.zeros(max_sequences, dtype=np.int32)
        self._block_table = np.zeros((max_sequences, -(-max_model_len // block_size)), dtype=np.int32)
        self._logit_rows = np.zeros(max_sequences, dtype=np.int32)
        # What each row of the block table holds: sequence, version and length. Steps mostly append to it.
        self._table_rows: list[tuple[Sequence | None, int, int]] = [(None, 0, 0)] * max_sequences

    def run(self, batch: Batch, top: int = 0) -> tuple[Scores, list[Sequence]]:
        """Compute the tokens of `batch` into the KV cache; doing so again changes nothing.

        Args:
            batch: the tokens.
            top: how many of the largest logits of each row suffice; 0: all are wanted. More may come.

        Returns:
            The scores of R sequences, those whose last token was computed, and the sequences.
        """
        ready = self._fill(batch)
        num_tokens, num_sequences = batch.num_tokens, len(batch.chunks)
        token_ids = torch.from_numpy(self._token_ids[:num_tokens])
        positions = torch.from_numpy(self._positions[:num_tokens])
        slots = torch.from_numpy(self._slots[:num_tokens])
        cu_query = torch.from_numpy(self._cu_query[: num_sequences + 1])
        context_len = torch.from_numpy(self._context_len[:num_sequences])
        block_table = torch.from_numpy(self._block_table[:num_sequences])
        logit_rows = torch.from_numpy(self._logit_rows[: len(ready)])
        if self.fused is not None:
            inputs = token_ids, positions, slots, cu_query, context_len, block_table, logit_rows, self.kv_pool
            if top:
                values_RK, ids_RK = self.fused.step_top(top, *inputs, kv_scale=self.kv_scale)
                return Scores(None, values_RK.numpy(), ids_RK.numpy()), ready
            return Scores.of_logits(self.fused.step(*inputs, self.kv_scale).numpy()), ready

        assert self.model is not None

        def attend(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            k_cache, v_cache = self.kv_pool[layer]
            k_scale, v_scale = (None, None) if self.kv_scale is None else self.kv_scale[layer]
            write_kv(k_TKD, v_TKD, k_cache, v_cache, slots, k_scale, v_scale)
            return paged_attention(
                q_THD,
                k_cache,
                v_cache,
                cu_query,
                context_len,
                block_table,
                self._scale,
                self._windows[layer],
                k_scale,
                v_scale,
            )

        with torch.inference_mode():
            logits_RV = self.model(token_ids.long(), positions.long(), pad_values(attend), logit_rows.long())
        return Scores.of_logits(logits_RV.numpy()), ready

    def _fill(self, batch: Batch) -> list[Sequence]:
        """Write the step's inputs into the buffers; the sequences whose logits are wanted, in order."""
        size, ready = self.block_size, []
        token_ids, positions, slots = self._token_ids, self._positions, self._slots
        row = 0
        for i, (sequence, num_tokens) in enumerate(batch.chunks):
            start = sequence.num_computed_tokens
            end = start + num_tokens
            if num_tokens == 1:
                token_ids[row] = sequence.token_ids[start]
                positions[row] = start
                slots[row] = sequence.block_table[start // size] * size + start % size
            else:
                position = np.arange(start, end)
                token_ids[row : row + num_tokens] = sequence.token_ids[start:end]
                positions[row : row + num_tokens] = position
                first = start // size
                blocks = np.array(sequence.block_table[first : (end - 1) // size + 1], dtype=np.int64)
                slots[row : row + num_tokens] = blocks[position // size - first] * size + position % size
            row += num_tokens
            self._cu_query[i + 1] = row
            self._context_len[i] = end
            self._fill_table_row(i, sequence)
            if end == len(sequence.token_ids):
                self._logit_rows[len(ready)] = row - 1
                ready.append(sequence)
        return ready

    def _fill_table_row(self, i: int, sequence: Sequence) -> None:
        table = sequence.block_table
        owner, version, length = self._table_rows[i]
        if owner is not sequence or version != sequence.table_version:
            length = 0
        if length < len(table):
            self._block_table[i, length : len(table)] = table[length:]
        self._table_rows[i] = (sequence, sequence.table_version, len(table))
