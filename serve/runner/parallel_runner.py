"""The first of several processes that compute a model together: it schedules, the others follow its steps."""

from __future__ import annotations

from pathlib import Path

import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import BrokenEngineError, ConfigError
from penjing.core.family import SEEING
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.tensor_parallel import Split, apply_tensor_parallel
from penjing.kernels.cpu.threads import default_threads
from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.low_rank import Pairs
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.sequence import Batch, Sequence
from penjing.serve.runner.kv_pool import allocate_cache
from penjing.serve.runner.model_step import ModelStep
from penjing.serve.runner.ranks import Workers, encode_step
from penjing.serve.runner.step_inputs import StepInputs
from penjing.serve.sampling.choice import StepScores


def check_parallel(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError unless the model in `folder` can be shared so; nothing of its weights is read."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.config_json.get("model_type") in SEEING:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel} does not fit a decoder that sees; leave tensor_parallel=1"
        )
    Split(checkpoint.config, config.tensor_parallel).check()
    if cpu_extension() is None:
        raise ConfigError("tensor_parallel needs the C++ kernels, whose numbers do not depend on a layer's width")


def start_workers(folder: Path, config: EngineConfig) -> Workers:
    """The other processes; the cores are shared among all."""
    return Workers(folder, config.tensor_parallel, _threads(config), config.max_model_len)


def cached_model(config: EngineConfig, model: DecoderConfig) -> DecoderConfig:
    """`model` with the key-value heads that all processes keep together."""
    if config.tensor_parallel == 1:
        return model
    heads = sum(Split(model, config.tensor_parallel).kv_heads)
    return model.model_copy(update={"num_key_value_heads": heads})


def _threads(config: EngineConfig) -> int:
    return max(1, default_threads() // config.tensor_parallel)


class ParallelRunner:
    """`penjing.serve.runner.runner.Runner` for a model in several processes: the same arguments of `run`, and the same
    results bit by bit."""

    def __init__(self, model: Decoder, config: EngineConfig, workers: Workers) -> None:
        """Take this process's part of `model` and connect to the others.

        Args:
            model: whole, or what `load_model` left with a `share`; it is changed.
            config: resolved.

        Raises:
            BrokenEngineError: another process ended while it loaded.
        """
        assert config.num_blocks is not None
        assert config.max_model_len is not None
        extension = cpu_extension()
        assert extension is not None  # `check_parallel` has looked
        extension.set_num_threads(_threads(config))
        self.block_size = config.block_size
        self.adapter_slots: dict[str, int] = {}
        self._workers = workers
        self._broken: BrokenEngineError | None = None
        split = Split(model.config, config.tensor_parallel)
        gather = workers.begin(config.model_dump_json().encode())
        apply_tensor_parallel(model, split, 0, gather, extension)
        self._step = ModelStep(model)
        self.cache = allocate_cache(split.share(0), config.num_blocks, config.block_size, config.kv_dtype)
        sizes = config.max_num_batched_tokens, config.max_num_sequences, config.max_model_len
        self.inputs = StepInputs(*sizes, config.block_size)

    @property
    def pids(self) -> list[int]:
        """Of the other processes."""
        return self._workers.pids

    def add_adapter(self, layers: Pairs) -> int:
        """There is none so far.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("adapters do not go with tensor_parallel so far; leave tensor_parallel=1")

    def remove_adapter(self, slot: int) -> None:
        """There is none."""
        raise AssertionError(slot)

    def run(self, batch: Batch, largest: bool = False) -> tuple[StepScores, list[Sequence]]:
        """Compute the tokens of `batch` into the caches of all processes; doing so again changes nothing.

        Args:
            batch: the tokens.
            largest: ignored: all logits come.

        Returns:
            The scores of R sequences, those whose last token was computed, and the sequences.

        Raises:
            BrokenEngineError: a process has ended or stalls, in this step or before; the others are ended too.
        """
        if self._broken is not None:
            raise self._broken
        ready = self.inputs.fill(batch)
        tensors = self.inputs.buffers.first(batch.num_tokens, len(batch.chunks), len(ready))
        try:
            self._workers.send(encode_step(tensors, self.block_size))
            with torch.inference_mode():
                logits_RV = self._step(tensors, self.cache)
        except Exception as error:  # whatever it was: the processes are no longer at the same step
            self._broken = self._workers.broken(error)
            raise self._broken from error
        return StepScores(logits_RV.numpy()), ready
