"""Measure training beside plain PyTorch loops: speed, precision, recomputation, checkpoint stall, loader.

    python benchmarks/run_train.py                # appends rows to benchmarks/results/train.jsonl; ten minutes
    python benchmarks/run_train.py --quick        # a minute, shows the rows and writes none

Contestants take turns, a few steps each; a row is the median over the turns. Decoder and ResNet are those of
recipes/decoder-tiny.toml and resnet-fashion.toml, on random tokens and images. On a GPU: run_train_gpu.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lib.rows import Row, append, new_row, show
from lib.train_contestants import DecoderBench, ImageBench, Run, interleave, make_shards, steps_of
from torch import nn

from penjing.core.cli import guarded
from penjing.core.config import load_recipe
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress, Silent, progress_bar
from penjing.train.data.prefetch import Prefetched
from penjing.train.families.classifier import ImageClassification
from penjing.train.numerics.precision import multiplies_bfloat16
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.objective import Batch, CrossEntropy
from penjing.train.plan.estimate import estimate_memory
from penjing.train.recipe.data import TextData
from penjing.train.recipe.model import DecoderModel
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.state.checkpoint import Checkpoints

NO_BFLOAT16 = "this processor has no instructions for bfloat16 products"
PARTS = ("loader", "checkpoints", "recomputation", "resnet", "decoder")
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile, which takes minutes")
    parser.add_argument("--quick", action="store_true", help="one turn, no compilation, rows are not written")
    arguments = parser.parse_args()
    turns = 1 if arguments.quick else arguments.turns
    with tempfile.TemporaryDirectory() as scratch, progress_bar() as progress:
        bench = Bench(Path(scratch), turns, progress)
        bench.compiles = not (arguments.quick or arguments.no_compile)
        rows = [row for part in arguments.parts for row in getattr(bench, part)()]
    if arguments.quick:
        show(rows)
    else:
        append("train", rows)
    return 0


class Bench:
    """The measurements; each method returns its rows."""

    def __init__(self, scratch: Path, turns: int, progress: Progress) -> None:
        recipe = load_recipe(TrainRecipe, ROOT / "recipes" / "decoder-tiny.toml")
        assert isinstance(recipe.data, TextData)
        assert isinstance(recipe.model, DecoderModel)
        config = DecoderConfig.model_validate(recipe.model.model_dump(exclude={"architecture", "init_std"}))
        shards = make_shards(scratch / "shards", config.vocab_size)
        self.bench = DecoderBench(config, shards, recipe.data.sequence_length, recipe.data.batch_size)
        self.tokens = recipe.data.sequence_length * recipe.data.batch_size
        self.scratch = scratch
        self.turns = turns
        self.progress = progress
        self.compiles = False
        self.modes = ("fp32", "bf16") if multiplies_bfloat16(torch.device("cpu")) else ("fp32",)

    def interleave(self, task: str, contestants: dict[str, Run], steps: int) -> dict[str, float]:
        """See `train_contestants.interleave`."""
        self.progress.start(task, 1)
        return interleave(contestants, self.turns, steps)

    def row(self, metric: str, value: float, unit: str, baseline: str, baseline_value: float) -> Row:
        """A row of this benchmark, a median over the turns."""
        return new_row("train", metric, value, unit, runs=self.turns, baseline=baseline, baseline_value=baseline_value)

    def decoder(self) -> list[Row]:
        """Tokens a second of penjing's loop beside plain ones, in float32 and bfloat16."""
        import transformers

        bench = self.bench
        contestants: dict[str, Run] = {}
        for mode in self.modes:
            contestants[mode] = steps_of(bench.trainer(mode))
            contestants[f"plain {mode}"] = bench.plain(bench.model(), mode)
            contestants[f"transformers {mode}"] = bench.plain(bench.transformers_model(), mode)
        best = self.modes[-1]
        if best == "bf16":
            contestants["hybrid"] = steps_of(bench.trainer("hybrid"))
        if self.compiles:
            contestants[f"{best} compiled"] = steps_of(bench.trainer(best, compiled=True))
        times = self.interleave("decoder", contestants, 2)
        llama = f"plain loop, transformers {transformers.__version__} Llama"
        pairs: list[tuple[str, str, str, str]] = []
        for mode in self.modes:
            pairs.append((f"decoder_{mode}", mode, "plain loop, same model", f"plain {mode}"))
            pairs.append((f"decoder_{mode}", mode, llama, f"transformers {mode}"))
        if best == "bf16":
            pairs.append(("decoder_bf16", "bf16", "penjing fp32", "fp32"))
            pairs.append(("decoder_hybrid", "hybrid", "penjing fp32", "fp32"))
        if self.compiles:
            pairs.append((f"decoder_{best}_compiled", f"{best} compiled", f"penjing {best}", best))
            pairs.append((f"decoder_{best}_compiled", f"{best} compiled", "plain loop, same model", f"plain {best}"))
        rate = {name: self.tokens / seconds for name, seconds in times.items()}
        rows = [self.row(metric, rate[name], "tok/s", baseline, rate[other]) for metric, name, baseline, other in pairs]
        return rows + self.unmeasured("decoder_bf16", "decoder_hybrid", unit="tok/s")

    def resnet(self) -> list[Row]:
        """Images a second of the ResNet recipe beside a plain loop, in float32 and bfloat16."""
        recipe = load_recipe(TrainRecipe, ROOT / "recipes" / "resnet-fashion.toml")
        task = ImageClassification(recipe, recipe.model, recipe.data, Silent())  # pyright: ignore[reportArgumentType]
        bench = ImageBench(task.build_model, (recipe.data.batch_size, 1, 28, 28))
        contestants = {mode: steps_of(bench.trainer(mode)) for mode in self.modes}
        contestants |= {f"plain {mode}": bench.plain(mode) for mode in self.modes}
        times = self.interleave("resnet", contestants, 5)
        rate = {name: recipe.data.batch_size / seconds for name, seconds in times.items()}
        rows = [
            self.row(f"resnet_{mode}", rate[mode], "img/s", "plain loop, same model", rate[f"plain {mode}"])
            for mode in self.modes
        ]
        if "bf16" in self.modes:
            rows.append(self.row("resnet_bf16", rate["bf16"], "img/s", "penjing fp32", rate["fp32"]))
        return rows + self.unmeasured("resnet_bf16", unit="img/s")

    def unmeasured(self, *metrics: str, unit: str) -> list[Row]:
        """Rows without a value for bfloat16 where the processor does not multiply it."""
        if "bf16" in self.modes:
            return []
        return [
            new_row("train", metric, None, unit, runs=0, baseline="penjing fp32", reason=NO_BFLOAT16)
            for metric in metrics
        ]

    def recomputation(self) -> list[Row]:
        """Time and activation memory of the three settings."""
        settings = ("none", "selective", "full")
        trainers = {name: steps_of(self.bench.trainer(recompute=name)) for name in settings}
        times = self.interleave("recomputation", trainers, 2)
        batch = next(self.bench.stream())
        sizes: dict[str, float] = {}
        for name in settings:

            def build(name: str = name) -> nn.Module:
                model = Decoder(self.bench.config)  # tensors without data are neither moved nor initialised
                apply_recompute(model, name)  # pyright: ignore[reportArgumentType]
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

    def checkpoints(self) -> list[Row]:
        """How long a checkpoint holds up the loop, beside writing it while the loop waits."""
        self.progress.start("checkpoints", 1)
        trainer = self.bench.trainer()
        steps_of(trainer)(1)
        checkpoints = Checkpoints(self.scratch / "checkpoints", keep=1)
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
        self.progress.start("loader", 1)
        stream = self.bench.stream()
        trainer = self.bench.trainer(self.modes[-1])
        waits = Waits(Prefetched(self.bench.stream()))
        trainer.stream = waits
        began = time.perf_counter()
        steps_of(trainer)(8)
        share = waits.seconds / (time.perf_counter() - began)
        waits.inner.close()
        num_batches = 200
        began = time.perf_counter()
        for _ in range(num_batches):
            next(stream)
        rate = num_batches * self.tokens / (time.perf_counter() - began)
        return [
            new_row("train", "loader", rate, "tok/s", runs=1),
            new_row("train", "io_wait", share, "share of step", runs=8),
        ]


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


if __name__ == "__main__":
    sys.exit(guarded(main))
