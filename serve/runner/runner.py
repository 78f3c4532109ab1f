"""Runs a batch through the model: the one file of a step that touches tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.fused import fuse_decoder, why_not_fused
from penjing.core.runtime.screen import screen_head
from penjing.kernels.cpu.key_blocks import StepBlocks
from penjing.kernels.low_rank import Pairs
from penjing.serve.engine.config import KvDtype
from penjing.serve.engine.sequence import Batch, Sequence
from penjing.serve.runner.kv_pool import allocate_cache
from penjing.serve.runner.model_step import ModelStep
from penjing.serve.runner.step_inputs import StepInputs
from penjing.serve.sampling.choice import StepScores


class Runner:
    """A decoder with its KV cache and the input buffers of a step, which are allocated once.

    The decoder's rows must not depend on the batch (`core.runtime.batch_invariant`, `core.runtime.quantized`): then
    neither does anything that this class computes.
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
        adapters: Mapping[str, Pairs] | None = None,
        key_blocks: StepBlocks | None = None,
        take_weights: bool = False,
    ) -> None:
        """
        Args:
            adapters: by their names.
            key_blocks: rows choose what they read by these.
            take_weights: `parameters` may be written between two steps.

        Raises:
            ConfigError: there are adapters or `key_blocks`, and a model that the C++ step does not take.
        """
        self.block_size = block_size
        self.parameters = own_parameters(model) if take_weights else None
        self.fused = fuse_decoder(model)  # the whole step in one call; None: the model's own layers on torch
        if self.fused is not None:
            screen_head(self.fused, model)
        self.layers = ModelStep(model) if self.fused is None else None  # the fused step has packed weights of its own
        self._why_not_fused = "" if self.fused is not None else why_not_fused(model)
        self.key_blocks = key_blocks
        if key_blocks is not None and self.fused is None:
            raise ConfigError(
                f"attention=window+blocks is for the C++ step alone, which this model does not run in: "
                f"{self._why_not_fused}"
            )
        self.adapter_slots: dict[str, int] = {}
        for name, layers in (adapters or {}).items():
            self.adapter_slots[name] = self.add_adapter(layers)
        self.cache = allocate_cache(model.config, num_blocks, block_size, kv_dtype)
        self.inputs = StepInputs(
            max_tokens, max_sequences, max_model_len, block_size, vocab_size=model.config.vocab_size
        )

    def add_adapter(self, layers: Pairs) -> int:
        """Take an adapter in, between two steps; its slot.

        Raises:
            ConfigError: the C++ step does not take the model.
        """
        if self.fused is None:
            raise ConfigError(
                f"adapters are for the C++ step alone, which this model does not run in: {self._why_not_fused}"
            )
        return self.fused.adapters.add(layers)

    def remove_adapter(self, slot: int) -> None:
        """Free a slot that no step uses any more, between two steps."""
        assert self.fused is not None, "it took the adapter in"
        self.fused.adapters.remove(slot)

    def keep_hidden(self) -> None:
        """From now on scores come with `hidden_RE`.

        Raises:
            ConfigError: the model does not run in the C++ step.
        """
        if self.fused is None:
            raise ConfigError(
                "speculate = draft is for the C++ step alone, which this model does not run in; take speculate = lookup"
            )
        self.fused.keep_hidden()

    def run(self, batch: Batch, largest: bool = False) -> tuple[StepScores, list[Sequence]]:
        """Compute the tokens of `batch` into the KV cache; doing so again changes nothing.

        Args:
            batch: the tokens.
            largest: the largest logit of each row suffices; more may come.

        Returns:
            The scores of R sequences, those whose last token was computed, and the sequences.
        """
        ready = self.inputs.fill(batch)
        tensors = self.inputs.buffers.first(batch.num_tokens, len(batch.chunks), len(ready))
        seen_XE, cache = self.inputs.seen.rows(), self.cache
        if self.fused is not None:
            adapter_T = self.inputs.adapter[: batch.num_tokens] if self.inputs.has_adapters else None
            if largest:
                values_R1, ids_R1 = self.fused.step_top(
                    1,
                    *tensors,
                    cache.pool,
                    kv_scale=cache.scale,
                    row_pool=cache.rows,
                    adapter_T=adapter_T,
                    seen_XE=seen_XE,
                    key_blocks=self.key_blocks,
                )
                return StepScores(None, values_R1.numpy()[:, 0], ids_R1.numpy()[:, 0], self.fused.hidden_RE), ready
            more = adapter_T, seen_XE, self.key_blocks, cache.rows
            logits_RV = self.fused.step(*tensors, cache.pool, cache.scale, *more)
            return StepScores(logits_RV.numpy(), hidden_RE=self.fused.hidden_RE), ready

        assert self.layers is not None
        return StepScores(self.layers(tensors, cache, seen_XE).numpy()), ready


def own_parameters(model: Decoder) -> dict[str, Tensor]:
    """By their names; each is given memory of its own, float32, which nothing else reads or writes."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32, copy=True)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
