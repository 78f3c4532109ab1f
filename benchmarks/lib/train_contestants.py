"""What run_train.py lets train side by side: penjing's loop and plain ones, on random tokens or images."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.train.data.order import Order
from penjing.train.data.shards import ShardIndex, ShardWriter, TokenShards, write_index
from penjing.train.data.stream import OrderedStream, Stream, shuffled
from penjing.train.data.tokens import TokenRows
from penjing.train.loop import Trainer
from penjing.train.numerics.compiled import compile_model
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.objective import CrossEntropy
from penjing.train.optim.clip import ClipConfig, GradientNorms
from penjing.train.optim.optimizer import OptimizerConfig, build_optimizer
from penjing.train.processes.world import World
from penjing.train.state.initial import decoder_weights, fill_weights

Run = Callable[[int], object]  # trains so many steps


class DecoderBench:
    """One decoder shape and its data; `batch_size` sequences of `length` random tokens a step."""

    def __init__(
        self, config: DecoderConfig, shards: Path, length: int, batch_size: int, device: torch.device | None = None
    ) -> None:
        self.config = config
        self.shards = TokenShards(shards, "train")
        self.length = length
        self.batch_size = batch_size
        self.device = device or torch.device("cpu")
        self._first: Decoder | None = None

    def model(self) -> Decoder:
        """The decoder, with the same weights each time; a billion of them take long to draw, and are drawn once."""
        if self._first is None:
            with self.device:
                self._first = Decoder(self.config).to(self.device)  # what turns positions is made on the CPU
            fill_weights(self._first, decoder_weights(0.02, self.config.num_hidden_layers, seed=0))
        return copy.deepcopy(self._first)

    def transformers_model(self) -> nn.Module:
        """transformers' Llama of the same shape."""
        from transformers import LlamaConfig, LlamaForCausalLM

        names = set(LlamaConfig().to_dict()) & set(DecoderConfig.model_fields)
        values = self.config.model_dump(include=names)
        with self.device:
            settings = {key: value for key, value in values.items() if value is not None}
            return LlamaForCausalLM(LlamaConfig(**settings)).to(self.device)  # pyright: ignore[reportArgumentType]

    def stream(self) -> OrderedStream[Order]:
        """Batches of random tokens."""
        rows = TokenRows(self.shards, self.length)
        return shuffled(rows, batch_size=self.batch_size, micro_batch=self.batch_size)

    def trainer(
        self,
        mode: str = "fp32",
        recompute: str = "none",
        compiled: bool = False,
        policy: tuple[dict[str, str], ...] = (),
    ) -> Trainer:
        """penjing's loop with clipping, as the recipe has it; it trains no step yet."""
        model = self.model()
        if compiled:
            compile_model(model, is_shared=False)
        apply_recompute(model, recompute)  # pyright: ignore[reportArgumentType]
        precision = PrecisionConfig.model_validate({"mode": mode, "policy": policy})
        return loop(model, CrossEntropy(), self.stream(), build_optimizer(model, OptimizerConfig()), precision)

    def plain(self, model: nn.Module, mode: str = "fp32") -> Run:
        """What one would write by hand around `model`: the same optimiser and clipping, autocast, nothing else."""
        optimizer = build_optimizer(model, OptimizerConfig())
        stream = self.stream()

        def loss() -> torch.Tensor:
            batch = {name: tensor.to(self.device) for name, tensor in next(stream).items()}
            logits = model(batch["tokens"])
            logits = logits if isinstance(logits, torch.Tensor) else logits.logits
            return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

        return plain_loop(model, optimizer, loss, mode)


class ImageBench:
    """The ResNet of a recipe on random images."""

    def __init__(self, build_model: Callable[[], nn.Module], shape: tuple[int, int, int, int]) -> None:
        self.build_model = build_model
        generator = torch.Generator().manual_seed(0)
        self.batch = {
            "images": torch.randn(shape, generator=generator),
            "targets": torch.randint(0, 10, shape[:1], generator=generator),
        }

    def trainer(self, mode: str) -> Trainer:
        """penjing's loop."""
        model = self.build_model()
        precision = PrecisionConfig.model_validate({"mode": mode})
        return loop(model, CrossEntropy("images"), Repeat(self.batch), self._optimizer(model), precision)

    def plain(self, mode: str) -> Run:
        """A loop by hand around the same model."""
        model = self.build_model()

        def loss() -> torch.Tensor:
            return F.cross_entropy(model(self.batch["images"]), self.batch["targets"])

        return plain_loop(model, self._optimizer(model), loss, mode)

    @staticmethod
    def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(model, OptimizerConfig(name="sgd"), 0.1)


class Repeat:
    """A stream that is one batch for ever."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


def loop(
    model: nn.Module,
    objective: CrossEntropy,
    stream: Stream,
    optimizer: torch.optim.Optimizer,
    precision: PrecisionConfig,
) -> Trainer:
    """A trainer on the device of `model`, with clipping at 1."""
    device = next(model.parameters()).device
    return Trainer(
        model,
        objective,
        stream,
        optimizer,
        0,
        world=World(device=device),
        norms=GradientNorms(ClipConfig()),
        precision=Precision(model, precision, device),
    )


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], mode: str) -> Run:
    """Forward, backward, clip, update; bfloat16 by one autocast region."""

    def region() -> AbstractContextManager[Any]:
        return torch.autocast(device, torch.bfloat16) if mode == "bf16" else nullcontext()

    device = next(model.parameters()).device.type

    def run(steps: int) -> None:
        for _ in range(steps):
            with region():
                total = loss()
            total.backward()
            total.item()  # as penjing's loop reads it: the device's time is the step's
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def steps_of(trainer: Trainer) -> Run:
    """Let a trainer go on for some steps."""

    def run(steps: int) -> None:
        trainer.steps += steps
        trainer.fit()

    return run


def interleave(contestants: dict[str, Run], turns: int, steps: int) -> dict[str, float]:
    """Median seconds of a step of each contestant over `turns` of `steps`; a first turn to warm up is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, run in contestants.items():
            began = time.perf_counter()
            run(steps)
            if turn:
                times[name].append((time.perf_counter() - began) / steps)
    return {name: statistics.median(measured) for name, measured in times.items()}


def make_shards(folder: Path, vocab_size: int) -> Path:
    """A million random tokens."""
    folder.mkdir()
    writer = ShardWriter(folder, "train", vocab_size)
    writer.add(np.random.default_rng(0).integers(0, vocab_size, 1_000_000).tolist())
    write_index(
        folder, ShardIndex(dtype="uint16", vocab_size=vocab_size, end_of_text=0, splits={"train": writer.close()})
    )
    return folder
