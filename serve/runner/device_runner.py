"""Runs a batch through the model on a CUDA device: inputs copied once, decode by CUDA graph, only results come back."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.device_step import DeviceStep, unsupported
from penjing.kernels.low_rank import Pairs
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.sequence import Batch, Sequence
from penjing.serve.runner.decode_graphs import Captured, DecodeGraphs, Tensors
from penjing.serve.runner.kv_pool import allocate_cache
from penjing.serve.runner.model_step import ModelStep
from penjing.serve.runner.step_inputs import StepBuffers, StepInputs, StepTensors
from penjing.serve.sampling.choice import StepScores

WARM_TOKENS = (16, 17, 33, 65, 129, 257)  # the INT8 products choose their tile by the number of rows


class DeviceRunner:
    """`penjing.serve.runner.runner.Runner` for a device: the same arguments of `run`, the same results up to rounding.

    Deterministic like it: every kernel computes a row alike whatever the batch, and a graph launches the same kernels.
    """

    def __init__(self, model: Decoder, config: EngineConfig, device: str = "cuda") -> None:
        """Move the weights, allocate the cache and, where `config` says so, capture decode steps.

        Args:
            config: resolved, see `penjing.serve.runner.kv_pool.resolve`.
            device: "cuda"; tests run the kernels on "cpu" in the interpreter.
        """
        assert config.num_blocks is not None
        assert config.max_model_len is not None
        self.device, self.block_size = device, config.block_size
        self.adapter_slots: dict[str, int] = {}
        sizes = config.num_blocks, config.block_size
        self.cache = cache = allocate_cache(model.config, *sizes, config.kv_dtype, device)
        self._pages = {"kv_pool": cache.pool, "kv_scale": cache.scale}
        on_cuda = device == "cuda"
        sizes = config.max_num_batched_tokens, config.max_num_sequences
        self.inputs = StepInputs(*sizes, config.max_model_len, config.block_size, pinned=on_cuda)
        self.buffers = StepBuffers(*sizes, self.inputs.buffers.block_table.shape[1], device)
        self._copied = torch.cuda.Event() if on_cuda else None  # the inputs have left the pinned buffers
        self.graphs: DecodeGraphs | None = None
        reason = unsupported(model)
        if reason is None:
            self._fused: DeviceStep | None = DeviceStep(model, device, DTYPES[config.dtype])
        else:
            logging.getLogger("penjing").info("steps run one operation after the other, without graphs: %s", reason)
            self._fused, self._layers = None, ModelStep(model.to(device))
        if on_cuda and self._fused is not None:
            self._warm_up(config.max_num_batched_tokens)
            if config.cuda_graphs:
                self.capture_decode(config.max_num_sequences)

    def capture_decode(
        self, max_sequences: int, capture: Callable[[Callable[[], Tensors]], Captured] | None = None
    ) -> None:
        """Capture steps of one token a sequence; see `DecodeGraphs`. Their rows write nothing meanwhile."""
        self.inputs.pad(0, max_sequences)
        self.buffers.copy_(self.inputs.buffers, max_sequences)
        self.graphs = DecodeGraphs(self._decode, max_sequences, capture)

    def add_adapter(self, layers: Pairs) -> int:
        """A device has none so far.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("adapters are served on a CPU only; take device=cpu")

    def remove_adapter(self, slot: int) -> None:
        """There is none."""
        raise AssertionError(slot)

    def run(self, batch: Batch, largest: bool = False) -> tuple[StepScores, list[Sequence]]:
        """Compute the tokens of `batch` into the KV cache; doing so again changes nothing.

        Args:
            batch: the tokens.
            largest: the largest logit of each row suffices; else all are copied to the host.

        Returns:
            The scores of R sequences, those whose last token was computed, and the sequences.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ready = self.inputs.fill(batch)
        num_sequences = len(batch.chunks)
        decode = self.graphs is not None and batch.num_tokens == num_sequences
        bucket = self.graphs.bucket(num_sequences) if decode and self.graphs is not None else None
        if bucket is not None:
            self.inputs.pad(num_sequences, bucket)
        self.buffers.copy_(self.inputs.buffers, bucket or num_sequences)
        if self._copied is not None:
            self._copied.record()
        tensors = self.buffers.first(batch.num_tokens, num_sequences, len(ready))
        with torch.inference_mode():
            if bucket is not None and self.graphs is not None:
                found = self.graphs.replay(bucket)
                rows = slice(num_sequences) if len(ready) == num_sequences else tensors.logit_rows.long()
                logits_RV, values_R1, ids_R1 = (x[rows] for x in found)
            else:
                logits_RV, values_R1, ids_R1 = self._compute(tensors)
            return _scores(logits_RV, values_R1, ids_R1, largest), ready

    def _compute(self, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `_with_largest`: of the rows that are asked for."""
        if self._fused is None:
            return _with_largest(self._layers(tensors, self.cache))
        return _with_largest(self._fused(*tensors, **self._pages))

    def _decode(self, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `_with_largest`: of every row of a step of one token a sequence, which the device's buffers describe."""
        assert self._fused is not None
        tensors = self.buffers.first(num_sequences, num_sequences, 0)[:-1]
        return _with_largest(self._fused(*tensors, None, **self._pages))

    def _warm_up(self, max_tokens: int) -> None:
        """Compile what steps of other sizes launch, so that no request waits for it; nothing is written."""
        buffers = self.inputs.buffers
        for num_tokens in sorted({*(n for n in WARM_TOKENS if n < max_tokens), max_tokens - 1, max_tokens} - {0}):
            buffers.slots[:num_tokens] = -1
            buffers.cu_query[1], buffers.context_len[0] = num_tokens, num_tokens
            self.buffers.copy_(buffers, 1)
            torch.cuda.synchronize()
            self._compute(self.buffers.first(num_tokens, 1, 1))
        buffers.cu_query[1] = 0


@torch.inference_mode()
def _with_largest(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (R, V) and the largest of each row with its id, (R, 1) each; NaN counts as the largest."""
    ids_R1 = logits_RV.argmax(dim=1, keepdim=True)
    return logits_RV, logits_RV.gather(1, ids_R1), ids_R1


def _scores(logits_RV: torch.Tensor, values_R1: torch.Tensor, ids_R1: torch.Tensor, largest: bool) -> StepScores:
    """What the host needs, copied there: the largest logits alone, or all of them."""
    if largest:
        return StepScores(None, values_R1[:, 0].float().cpu().numpy(), ids_R1[:, 0].cpu().numpy())
    return StepScores(logits_RV.float().cpu().contiguous().numpy())
