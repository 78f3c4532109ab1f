"""Measure training of a decoder of 1.1 B parameters on a CUDA device: MFU in bfloat16, other modes and a peer.

    python benchmarks/run_train_gpu.py              # appends rows to benchmarks/results/train.jsonl
    python benchmarks/run_train_gpu.py --no-compile

Without a CUDA device the rows say so and hold no value.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from lib.rows import Row, append, new_row
from lib.train_contestants import DecoderBench, interleave, make_shards, steps_of

from penjing.core.cli import guarded
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.train.monitor.flops import model_flops, peak_flops
from penjing.train.objective.objective import CrossEntropy

LENGTH, BATCH, STEPS = 2048, 4, 4  # contestants with the state of their optimizers share the memory
MODEL = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}
FP8 = ({"match": "linears", "compute": "fp8"}, {"match": "head", "compute": "bf16"})
ROWS = (("mfu_1b_bf16", "share"), ("decoder_1b_bf16", "tok/s"), ("decoder_1b_fp8", "tok/s"))


def main() -> int:
    """Measure and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        with tempfile.TemporaryDirectory() as scratch:
            rows = measure(Path(scratch), arguments.turns, not arguments.no_compile)
    else:
        reason = "needs a CUDA device, which is not here"
        rows = [new_row("train", metric, None, unit, runs=0, reason=reason) for metric, unit in ROWS]
    append("train", rows)
    return 0


def measure(scratch: Path, turns: int, compiled: bool) -> list[Row]:
    """Tokens a second of each mode and what they are of the device's peak."""
    device = torch.device("cuda")
    config = DecoderConfig.model_validate(MODEL)
    bench = DecoderBench(config, make_shards(scratch / "shards", config.vocab_size), LENGTH, BATCH, device)
    example = next(bench.stream())
    flops = 3 * model_flops(lambda: Decoder(config), CrossEntropy(), example)
    major, minor = torch.cuda.get_device_capability(device)
    has_fp8 = 10 * major + minor >= 89
    contestants = {"tf32": steps_of(bench.trainer("tf32")), "bf16": steps_of(bench.trainer("bf16", compiled=compiled))}
    if has_fp8:
        contestants["fp8"] = steps_of(bench.trainer("bf16", policy=FP8, compiled=compiled))
    # The loop reads the loss of each step, which waits for the device: a step's time is the device's.
    times = interleave(contestants, turns, STEPS)
    contestants.clear()
    torch.cuda.empty_cache()
    peer = {
        "bf16": steps_of(bench.trainer("bf16", compiled=compiled)),
        "peer": bench.plain(bench.transformers_model(), "bf16"),
    }
    beside = {name: LENGTH * BATCH / seconds for name, seconds in interleave(peer, turns, STEPS).items()}
    rate = {name: LENGTH * BATCH / seconds for name, seconds in times.items()}
    peak, origin = peak_flops(device, torch.bfloat16)
    name = torch.cuda.get_device_name(device)
    mfu = flops / times["bf16"] / peak
    rows = [
        new_row("train", "mfu_1b_bf16", mfu, "share", runs=turns, baseline=origin, share_of_limit=mfu, device=name),
        _row("decoder_1b_bf16", rate["bf16"], turns, "penjing tf32", rate["tf32"]),
        _row("decoder_1b_bf16", beside["bf16"], turns, "transformers bf16", beside["peer"]),
    ]
    if has_fp8:
        return [*rows, _row("decoder_1b_fp8", rate["fp8"], turns, "penjing bf16", rate["bf16"])]
    reason = f"needs compute capability 8.9, this device has {major}.{minor}"
    return [*rows, new_row("train", "decoder_1b_fp8", None, "tok/s", runs=0, reason=reason)]


def _row(metric: str, value: float, turns: int, baseline: str, baseline_value: float) -> Row:
    against = {"baseline": baseline, "baseline_value": baseline_value, "device": torch.cuda.get_device_name()}
    return new_row("train", metric, value, "tok/s", runs=turns, **against)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    sys.exit(guarded(main))
