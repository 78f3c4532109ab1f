"""Train one recipe in each precision mode from the same start: final loss and step time against fp32, curves overlaid.

python benchmarks/run_precision.py --steps 120      # rows in benchmarks/results/precision.jsonl and
                                                    # docs/figures/train-precision.svg
# Where a processor lacks instructions for a format it computes the same losses at a hundredth of the speed: take a
# small network. Rows then begin with the prefix.
python benchmarks/run_precision.py --modes fp32 bf16 hybrid fp16 --prefix small_ --figure build/small.svg \
    --set model.hidden_size=64 model.intermediate_size=160 model.num_hidden_layers=2 data.batch_size=4 \
          data.sequence_length=64
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from lib.plot_engine import FIGURES
from lib.plot_train import draw, read_curve
from lib.rows import append, new_row

from penjing.core.cli import guarded
from penjing.core.progress import progress_bar
from penjing.train.numerics.precision import MODES, multiplies_bfloat16
from penjing.train.run import train

ROOT = Path(__file__).resolve().parents[1]

WITHOUT_A_GPU = {
    "tf32": "needs an NVIDIA GPU",
    "fp16": "needs a GPU: torch's float16 products on a CPU without AVX512-FP16 take 100 times as long as float32's",
}


SLOW_HERE = dict.fromkeys(("bf16", "hybrid"), "this processor has no instructions for bfloat16 products")


def not_here() -> dict[str, str]:
    """The modes that this machine cannot train in, or only at a hundredth of the speed, and why."""
    if torch.cuda.is_available():
        return {}
    return WITHOUT_A_GPU | ({} if multiplies_bfloat16(torch.device("cpu")) else SLOW_HERE)


def modes_here() -> list[str]:
    """The modes that this machine can train in."""
    return [mode for mode in MODES if mode != "auto" and mode not in not_here()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "decoder-tiny.toml")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--modes", nargs="+", default=modes_here(), help="the first is the baseline")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--prefix", default="", help="what the names of rows begin with")
    parser.add_argument("--figure", type=Path, default=FIGURES / "train-precision.svg")
    arguments = parser.parse_args()
    losses: dict[str, float] = {}
    seconds: dict[str, float] = {}
    curves = {}
    with tempfile.TemporaryDirectory() as scratch, progress_bar() as progress:
        for mode in arguments.modes:
            output = Path(scratch) / mode
            settings = [f"output={output}", f"steps={arguments.steps}", f"precision.mode={mode}"]
            settings += ["evaluation.every=1000000", "monitor.every=2", "monitor.tensorboard=false"]
            settings += arguments.set
            losses[mode] = train(arguments.recipe, settings, progress=progress)["loss"]
            run = output.with_name(f"{mode}-run")
            curves[mode] = read_curve(run, "loss")
            seconds[mode] = statistics.median(read_curve(run, "step_s")[1])
    baseline = arguments.modes[0]
    rows = []
    for mode in arguments.modes:
        for metric, unit, values in (("loss", "nats", losses), ("step", "s", seconds)):
            if metric == "loss" or mode not in not_here():
                against = {} if mode == baseline else {"baseline": baseline, "baseline_value": values[baseline]}
                if torch.cuda.is_available():
                    against["device"] = torch.cuda.get_device_name()
                name = f"{arguments.prefix}{metric}_{mode}"
                rows.append(new_row("precision", name, values[mode], unit, runs=1, **against))  # pyright: ignore[reportArgumentType]
    if not arguments.prefix:
        rows += [
            new_row("precision", f"{metric}_{mode}", None, unit, runs=0, reason=reason)
            for mode, reason in not_here().items()
            for metric, unit in (("loss", "nats"), ("step", "s"))
            if metric == "step" or mode not in arguments.modes
        ]
    append("precision", rows)
    draw(curves, arguments.figure)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
