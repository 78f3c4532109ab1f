"""Measure training beside a plain PyTorch loop: step time, precision, recomputation, checkpoint stall, loader.

    python benchmarks/run_train.py                # appends rows to benchmarks/results/train.jsonl
    python benchmarks/run_train.py --compile      # also torch.compile, which takes a minute to compile

Contestants take turns, a few steps each; a row is the median over the turns. The decoder is that of
recipes/decoder-tiny.toml on random tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rows import Row, append, new_row
from torch import nn

from penjing.core.cli import guarded
from penjing.core.config import load_recipe
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.train.checkpoint import Checkpoints
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.shards import ShardIndex, ShardWriter, TokenShards, write_index
from penjing.train.data.tokens import TokenStream
from penjing.train.gradients import ClipConfig, GradientNorms
from penjing.train.language import initialize_decoder
from penjing.train.loop import Trainer
from penjing.train.memory import estimate_memory
from penjing.train.objective import Batch, CrossEntropy
from penjing.train.optimizer import OptimizerConfig, build_optimizer
from penjing.train.precision import Precision, PrecisionConfig
from penjing.train.recipe import DecoderModel, TextData, TrainRecipe
from penjing.train.recompute import apply_recompute

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
STEPS = 2  # of one turn
Run = Callable[[int], object]  # trains so many steps


def main() -> int:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile")
    arguments = parser.parse_args()
    recipe = load_recipe(TrainRecipe, ROOT / "recipes" / "decoder-tiny.toml")
    assert isinstance(recipe.data, TextData)
    assert isinstance(recipe.model, DecoderModel)
    config = DecoderConfig.model_validate(recipe.model.model_dump(exclude={"architecture", "init_std"}))
    with tempfile.TemporaryDirectory() as scratch:
        shards = make_shards(Path(scratch) / "shards", config.vocab_size)
        bench = Bench(config, shards, recipe.data.sequence_length, recipe.data.batch_size, arguments.turns)
        rows = (
            bench.loops(arguments.compile) + bench.recomputation() + bench.checkpoints(Path(scratch)) + bench.loader()
        )
    rows += [
        new_row("train", metric, None, unit, runs=0, reason="needs a CUDA device, which is not here")
        for metric, unit in (("mfu_1b_bf16", "share"), ("fp8_gain", "×"), ("bf16_vs_fp32_gpu", "×"))
    ]
    append("train", rows)
    return 0


class Bench:
    """One model shape, its data, and the contestants."""

    def __init__(self, config: DecoderConfig, shards: Path, length: int, batch_size: int, turns: int) -> None:
        self.config = config
        self.shards = TokenShards(shards, "train")
        self.length = length
        self.batch_size = batch_size
        self.turns = turns

    def loops(self, compiled: bool) -> list[Row]:
        """Step time of penjing's loop beside a plain one, in float32 and bfloat16."""
        trainer = self.trainer()
        contestants: dict[str, Run] = {
            "plain": self.plain(self.model(), lambda model, tokens: model(tokens)),
            "transformers": self.plain(self.transformers_model(), lambda model, tokens: model(tokens).logits),
            "penjing": self.steps_of(trainer),
            "penjing bf16": self.steps_of(self.trainer("bf16")),
            "penjing hybrid": self.steps_of(self.trainer("hybrid")),
        }
        if compiled:
            contestants["penjing compiled"] = self.steps_of(self.trainer(compiled=True))
        times = interleave(contestants, self.turns)
        import transformers

        peer = f"plain loop, transformers {transformers.__version__} Llama"
        pairs = [
            ("step_fp32", "penjing", "plain loop, same model", "plain"),
            ("step_fp32", "penjing", peer, "transformers"),
            ("step_bf16", "penjing bf16", "penjing fp32", "penjing"),
            ("step_hybrid", "penjing hybrid", "penjing fp32", "penjing"),
        ]
        if compiled:
            pairs.append(("step_fp32_compiled", "penjing compiled", "plain loop, same model", "plain"))
        return [self.row(metric, times[name], "s", baseline, times[other]) for metric, name, baseline, other in pairs]

    def row(self, metric: str, value: float, unit: str, baseline: str, baseline_value: float) -> Row:
        """A row of this benchmark, a median over the turns."""
        return new_row("train", metric, value, unit, runs=self.turns, baseline=baseline, baseline_value=baseline_value)

    def recomputation(self) -> list[Row]:
        """Time and activation memory of the three settings."""
        settings = ("none", "selective", "full")
        times = interleave({name: self.steps_of(self.trainer(recompute=name)) for name in settings}, self.turns)
        batch = next(self.stream())
        sizes: dict[str, float] = {}
        for name in settings:

            def build(name: str = name) -> nn.Module:
                model = Decoder(self.config)
                apply_recompute(model, name)  # type: ignore[arg-type]
                return model

            estimate = estimate_memory(
                build, CrossEntropy(), batch, optimizer="adamw", averaged=False, replicated=False
            )
            sizes[name] = estimate.activations / 2**20
        none = "no recomputation"
        rows = []
        for name in settings[1:]:
            rows.append(self.row(f"step_recompute_{name}", times[name], "s", none, times["none"]))
            rows.append(self.row(f"activations_recompute_{name}", sizes[name], "MiB", none, sizes["none"]))
        return rows

    def checkpoints(self, scratch: Path) -> list[Row]:
        """How long a checkpoint holds up the loop, beside writing it while the loop waits."""
        trainer = self.trainer()
        trainer.steps = 1
        trainer.fit()
        checkpoints = Checkpoints(scratch / "checkpoints", keep=1)
        state = trainer.state_dict()
        stalls, waits = [], []
        for turn in range(self.turns):
            checkpoints.save(2 * turn, state)
            stalls.append(checkpoints.stall_s)
            checkpoints.wait()
            checkpoints.save(2 * turn + 1, state, wait=True)
            waits.append(checkpoints.stall_s)
        stall, wait = statistics.median(stalls), statistics.median(waits)
        return [self.row("checkpoint_stall", stall, "s", "waiting for the disk", wait)]

    def loader(self) -> list[Row]:
        """Tokens a second that the loader delivers, and the share of a step that the loop waits for it."""
        stream = self.stream()
        trainer = self.trainer()
        waits = Waits(Prefetched(self.stream()))
        trainer.stream = waits
        began = time.perf_counter()
        self.steps_of(trainer)(8)
        share = waits.seconds / (time.perf_counter() - began)
        waits.inner.close()
        num_batches = 200
        began = time.perf_counter()
        for _ in range(num_batches):
            next(stream)
        rate = num_batches * self.batch_size * self.length / (time.perf_counter() - began)
        return [
            new_row("train", "loader", rate, "tok/s", runs=1),
            new_row("train", "io_wait", share, "share of step", runs=8),
        ]

    def model(self) -> Decoder:
        """The decoder, initialised the same each time."""
        torch.manual_seed(0)
        model = Decoder(self.config)
        initialize_decoder(model, 0.02, self.config.num_hidden_layers)
        return model

    def transformers_model(self) -> nn.Module:
        """transformers' Llama of the same shape."""
        from transformers import LlamaConfig, LlamaForCausalLM

        names = {
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "rms_norm_eps",
            "tie_word_embeddings",
        }
        return LlamaForCausalLM(LlamaConfig(**self.config.model_dump(include=names)))

    def stream(self) -> TokenStream:
        """Batches of random tokens."""
        return TokenStream(self.shards, self.length, batch_size=self.batch_size, micro_batch=self.batch_size)

    def trainer(self, mode: str = "fp32", recompute: str = "none", compiled: bool = False) -> Trainer:
        """penjing's loop with clipping, as the recipe has it."""
        model = self.model()
        apply_recompute(model, recompute)  # type: ignore[arg-type]
        precision = Precision(model, PrecisionConfig(mode=mode), CPU)  # type: ignore[arg-type]
        if compiled:
            model.compile()
        optimizer = build_optimizer(model, OptimizerConfig())
        norms = GradientNorms(ClipConfig())
        return Trainer(model, CrossEntropy(), self.stream(), optimizer, 0, norms=norms, precision=precision)

    def plain(self, model: nn.Module, logits_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Run:
        """What one would write by hand: the same optimiser and clipping, nothing else."""
        optimizer = build_optimizer(model, OptimizerConfig())
        stream = self.stream()

        def run(steps: int) -> None:
            for _ in range(steps):
                batch = next(stream)
                logits = logits_of(model, batch["tokens"])
                F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        return run

    @staticmethod
    def steps_of(trainer: Trainer) -> Run:
        """Let a trainer go on for some steps."""

        def run(steps: int) -> None:
            trainer.steps += steps
            trainer.fit()

        return run


class Waits:
    """A stream that adds up how long the loop waited for it."""

    def __init__(self, inner: Prefetched) -> None:
        self.inner = inner
        self.seconds = 0.0

    def __iter__(self) -> Waits:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        batch = next(self.inner)
        self.seconds += time.perf_counter() - began
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Of the inner stream."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the inner stream."""
        self.inner.load_state_dict(state)


def interleave(contestants: dict[str, Run], turns: int) -> dict[str, float]:
    """Median seconds of a step of each; a first turn to warm up is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, run in contestants.items():
            began = time.perf_counter()
            run(STEPS)
            if turn:
                times[name].append((time.perf_counter() - began) / STEPS)
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


if __name__ == "__main__":
    sys.exit(guarded(main))
