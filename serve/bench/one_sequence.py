"""One sequence in a paged cache, computed by the C++ step without an engine, as benchmarks of attention want it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.core.models.config import DecoderConfig
from penjing.kernels.cpu.key_blocks import StepBlocks
from penjing.kernels.decoder_step import DecoderStep
from penjing.serve.engine.config import EngineConfig, KvDtype
from penjing.serve.runner.key_blocks import allocate_summaries
from penjing.serve.runner.kv_pool import PagedCache, allocate_cache

PAGE, CHUNK = 16, 256


@dataclass
class OneSequence:
    """Pages of one sequence, in order, and the summaries where rows choose."""

    config: DecoderConfig
    step: DecoderStep
    cache: PagedCache
    blocks: StepBlocks | None

    @classmethod
    def make(
        cls, config: DecoderConfig, step: DecoderStep, kind: KvDtype, engine: EngineConfig, tokens: int
    ) -> OneSequence:
        """An empty cache for `tokens`, kept as `kind`; of `engine` what is said about attention counts."""
        size = max(PAGE, engine.attention_block)
        pages = -(-tokens // size)
        engine = engine.model_copy(update={"num_blocks": pages, "kv_dtype": kind, "block_size": size})
        return cls(config, step, allocate_cache(config, pages, size, kind), allocate_summaries(engine, config))

    def run(self, ids_T: Tensor, start: int, wanted: Tensor, blocks: StepBlocks | None = None) -> Tensor:
        """Compute tokens that stand from `start` on.

        Args:
            wanted: int64, rows whose logits are returned.
            blocks: how rows choose this time, in place of `self.blocks`.

        Returns:
            (wanted, vocabulary) float32, the step's own memory: the next call overwrites it.
        """
        end = start + len(ids_T)
        position = torch.arange(start, end)
        table = torch.arange(self.cache.pool.shape[2], dtype=torch.int32)[None]
        lengths = torch.tensor([0, len(ids_T)]).int(), torch.tensor([end]).int()
        numbers = ids_T.int(), position.int(), position, *lengths, table, wanted.int(), self.cache.pool
        return self.step.step(*numbers, self.cache.scale, key_blocks=blocks or self.blocks, row_pool=self.cache.rows)

    def prefill(self, ids_T: Tensor, start: int) -> None:
        """Compute tokens in chunks, so that those of a later chunk choose among blocks of an earlier one."""
        for at in range(0, len(ids_T), CHUNK):
            self.run(ids_T[at : at + CHUNK], start + at, torch.arange(0))
