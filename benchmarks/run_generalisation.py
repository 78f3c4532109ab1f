"""What INT8 costs SmolLM2 on texts that nothing resembles which it was calibrated on, as rows of every variant × text.

    python benchmarks/run_generalisation.py                                  # every variant, 32 windows of each text
    python benchmarks/run_generalisation.py --variants smollm2-int8 --windows 8 --texts news essays
    python benchmarks/run_generalisation.py --artifact mine=build/smollm2-int8

A variant is a recipe with settings of its own, calibrated and not trained. Rows are VARIANT/TEXT_rise with the ends of
its 95 % interval, over the same windows as the checkpoint; VARIANT/worst_rise is the largest of the texts that were
never looked at while calibration was worked on (all but `scripture`), with that text's interval.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from lib.models import CHECKPOINT
from lib.rows import RESULTS, Row, append, new_row
from lib.texts import LATER, SOURCES, UNSEEN
from torch import Tensor

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.measure.evaluate import Change, EvaluateSettings, Quality, compare, perplexity
from penjing.compress.measure.perplexity import streamed_losses
from penjing.compress.quantizers.decoder import DecoderQuantize
from penjing.compress.recipe import load_recipe
from penjing.compress.samples.data import token_samples
from penjing.compress.samples.text import spread
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.cli import guarded
from penjing.core.errors import ConfigError, SetupError
from penjing.core.progress import Progress, progress_bar
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.work import Tasks

BENCHMARK, ORIGINAL = "generalisation", "the FP32 checkpoint"
WINDOW = 512
INT8, HADAMARD = "smollm2-int8", "smollm2-int8-hadamard"
SYMMETRIC, HALF = "steps.0.zero_points=[]", "steps.0.keep_dtype=float16"
KEEP_3 = 'steps.0.keep=["model.layers.[0-2].mlp.down_proj"]'
VARIANTS = {  # recipe, settings
    INT8: (INT8, []),
    "int8-symmetric": (INT8, [SYMMETRIC]),
    "int8-keep-3": (INT8, [SYMMETRIC, KEEP_3]),
    "int8-zero-keep-3": (INT8, [KEEP_3, HALF]),
    "int8-alphas": (INT8, ["steps.0.transform.search_steps=0"]),
    "int8-nearest": (INT8, ["steps.0.rounding=nearest"]),
    "int8-keep-down": (INT8, ['steps.0.keep=["*.down_proj"]']),
    HADAMARD: (HADAMARD, []),
    "int8-twice": (INT8, ["data.tokens=12288"]),  # twice the text
    "int8-own": (INT8, ['data.calibrate=["builtin:own"]']),  # half of the windows are the model's own
    "int8-own-alone": (INT8, ['data.calibrate=["builtin:own"]', "data.own=1.0"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--artifact", nargs="*", default=[], metavar="NAME=FOLDER", help="artifacts that exist")
    parser.add_argument("--texts", nargs="+", default=list(SOURCES), choices=[*SOURCES, *LATER])
    parser.add_argument("--windows", type=int, default=32, help=f"of {WINDOW} tokens of each text")
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.variants) - VARIANTS.keys()):
        raise ConfigError(f"--variants {unknown[0]}: there is no such variant; take {', '.join(VARIANTS)}")
    rows: list[Row] = []
    windows, versions = text_windows(arguments.model, arguments.texts, arguments.windows, rows)
    with progress_bar() as progress:
        before = qualities(arguments.model, windows, progress)
        for name, quality in before.items():
            metric = f"{floating(arguments.model)}/{name}"
            rows.append(new_row(BENCHMARK, metric, quality.value, "perplexity", runs=1, more_versions=versions))
        append(BENCHMARK, rows, arguments.results)
        for name in arguments.variants:
            with tempfile.TemporaryDirectory() as scratch:
                began = time.monotonic()
                made = calibrated(arguments.model, name, Path(scratch), progress)
                seconds = time.monotonic() - began
                rows = variant_rows(name, before, qualities(made, windows, progress), versions)
                size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
            rows.append(new_row(BENCHMARK, f"{name}/size", size, "bytes", runs=1))
            rows.append(new_row(BENCHMARK, f"{name}/seconds", seconds, "s", runs=1))
            append(BENCHMARK, rows, arguments.results)
        for name, _, folder in (each.partition("=") for each in arguments.artifact):
            after = qualities(Path(folder), windows, progress)
            append(BENCHMARK, variant_rows(name, before, after, versions), arguments.results)
    return 0


def floating(model: Path) -> str:
    """What rows of the checkpoint itself begin with."""
    return "fp32" if model.resolve() == CHECKPOINT.resolve() else f"{model.name}-fp32"


def text_windows(
    model: Path, names: Sequence[str], count: int, missing: list[Row]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Evenly spread windows of each text, and the beginning of each text's SHA-256; a text that cannot be fetched
    becomes a row of `missing`."""
    tokenizer, windows, versions = Tokenizer.from_folder(model), dict[str, Tensor](), dict[str, str]()
    for name in names:
        try:
            text = (SOURCES | LATER)[name].text()
        except SetupError as error:
            metric = f"{floating(model)}/{name}"
            missing.append(new_row(BENCHMARK, metric, None, "perplexity", runs=0, reason=str(error)))
            continue
        windows[name] = spread(tokenizer, tokenizer.encode(text, allow_special=False), count, WINDOW)
        versions[f"text {name}"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    return windows, versions


def calibrated(model: Path, name: str, scratch: Path, progress: Progress) -> Path:
    """The folder of a variant's weights."""
    recipe, overrides = VARIANTS[name]
    loaded = load_recipe(Path("recipes") / f"{recipe}.toml", [f"model={model}", *overrides])
    step = loaded.steps[0]
    assert isinstance(step, DecoderQuantize)
    windows_WT = token_samples(model, loaded.data, progress).windows
    return make_weights(model, step, windows_WT, Tasks(scratch), progress)[0]


@torch.no_grad()
def qualities(folder: Path, windows: dict[str, Tensor], progress: Progress) -> dict[str, Quality]:
    """The perplexity of each text."""
    checkpoint = open_checkpoint(folder)
    progress.start(f"perplexity of {folder.name}", checkpoint.config.num_hidden_layers)
    losses = streamed_losses(LayerStream(checkpoint), windows, progress)
    return {name: perplexity({name: part}, EvaluateSettings()) for name, part in losses.items()}


def variant_rows(
    name: str, before: dict[str, Quality], after: dict[str, Quality], versions: dict[str, str] | None = None
) -> list[Row]:
    """The rise of each text's perplexity with its interval, and the largest of the texts that were never looked at."""
    rises = {text: compare(quality, after[text]) for text, quality in before.items()}
    unseen = [text for text in rises if text in UNSEEN]

    def rows(metric: str, change: Change) -> list[Row]:
        values = (("", change.value), ("_low", change.low), ("_high", change.high))
        return [
            new_row(BENCHMARK, f"{name}/{metric}_rise{end}", 100 * value, "%", runs=1, more_versions=versions)
            for end, value in values
        ]

    found = [row for text, change in rises.items() for row in rows(text, change)]
    if unseen:
        worst = max(unseen, key=lambda text: rises[text].value)
        found += rows("worst", rises[worst])
    return found


if __name__ == "__main__":
    raise SystemExit(guarded(main))
