"""What networks of images and text reach on what they have never seen; appends rows.

    python benchmarks/run_vision_language.py       # trains both recipes, whose inputs their first lines make
    python benchmarks/run_vision_language.py --seeds 1 2 3      # each from three seeds, and a decoder that is blind
    python benchmarks/run_vision_language.py --trained build/clip-emoji build/vlm-tiny   # runs that are there already,
                                                                # such as the baselines that clip-emoji.toml names
    python benchmarks/run_vision_language.py --pixels           # what no network reaches: the nearest drawing in pixels
    python benchmarks/run_vision_language.py --int8 build/vlm-int8      # what INT8 costs in answers, and its size
    python benchmarks/run_vision_language.py --times build/vlm-tiny build/vlm-int8  # an answer about a new image, and
                                                                # about one that was seen; a checkpoint, its artifact
    python benchmarks/run_vision_language.py --large build/smollm2 build/smollm2-int8 --rounds 5    # the same with
                                                                # eyes of SmolVLM-256M's shape, of random weights
    python benchmarks/run_vision_language.py --beside build/smollm2-int8 --rounds 4     # what images cost the answers
                                                                # of others, behind a Triton server, with such eyes

The figures are of the recipe's last evaluation: retrieval of a vendor's emoji by two towers, and exact answers about
scenes of Fashion-MNIST. Each stands beside what guessing reaches. Times are processor time of the whole process, which
other programs disturb less than the clock; contestants take turns.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lib.image_cost import cost_rows, measure
from lib.models import warn_if_busy
from lib.random_eyes import SMOLVLM_256M, random_eyes, rounded, seeing_artifact
from lib.rows import RESULTS, Row, append, new_row
from numpy.typing import NDArray
from PIL import Image

from penjing.core.artifact.base import read_report_file
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import guarded
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import decode_image
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from penjing.core.runtime.batch_invariant import apply_image_invariance
from penjing.kernels.cpu.threads import default_threads
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine, make_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.data.emoji import emoji_pairs
from penjing.train.run import train

RECIPES = ("clip-emoji", "vlm-tiny")
DRAWN = 1860  # emoji that the vendor draws that is never seen, each with a name of its own
ANSWER = 8  # tokens
PHASE_SECONDS = 8.0
_NUMBERS = itertools.count()
DIGITS = 10
OTHERS = 9  # classes of Fashion-MNIST that a thing's neighbour may be of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of the runs")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES, help="what is trained")
    parser.add_argument("--pixels", action="store_true", help="train nothing, compare pixels of emoji")
    parser.add_argument("--trained", type=Path, nargs="+", help="checkpoints of finished runs of the recipes")
    parser.add_argument("--int8", type=Path, help="artifact whose recipe asked questions")
    parser.add_argument("--times", type=Path, nargs=2, help="a checkpoint that sees and its artifact")
    parser.add_argument("--large", type=Path, nargs=2, help="a decoder and its artifact, which get random eyes")
    parser.add_argument("--beside", type=Path, help="an INT8 artifact of a decoder, which gets random eyes")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of the decoder, and of the eyes")
    parser.add_argument("--rounds", type=int, default=15, help="requests of each kind that are timed")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.int8:
        append("vision_language", int8_rows(read_report_file(arguments.int8), arguments.int8.name), arguments.results)
        return 0
    if arguments.times:
        checkpoint, artifact = arguments.times
        engines = {name: load_engine(folder, EngineConfig()) for name, folder in
                   (("fp32", checkpoint), ("int8", artifact))}  # fmt: skip
        append("vision_language", time_rows(engines, artifact.name, arguments.rounds), arguments.results)
        return 0
    if arguments.large:
        append(
            "vision_language", time_rows(large(*arguments.large), "smolvlm-256m", arguments.rounds), arguments.results
        )
        return 0
    if arguments.beside:
        warn_if_busy()
        os.environ["PENJING_CPU_THREADS"] = str(arguments.threads)
        named = f"smolvlm-256m/int8/{arguments.threads}_threads"
        with tempfile.TemporaryDirectory() as scratch:
            model = seeing_artifact(arguments.beside, Path(scratch) / "model")
            found = measure(model, SMOLVLM_256M.image_size, PHASE_SECONDS, arguments.rounds)
        append("vision_language", cost_rows(named, found), arguments.results)
        return 0
    if arguments.pixels:
        append("vision_language", [nearest_pixels()], arguments.results)
        return 0
    folders = arguments.trained or runs(arguments.recipes, arguments.seeds)
    for folder in folders:  # one after the other, so that what is done stays when a later run fails
        append("vision_language", rows_of(read_manifest(folder).created_by), arguments.results)
    return 0


def runs(recipes: Sequence[str], seeds: Sequence[int]) -> Iterator[Path]:
    """The checkpoints of recipes that run now, from each seed; the decoder that sees also once without looking."""
    for name in recipes:
        for seed in seeds:
            yield trained(name, f"{name}-{seed}" if len(seeds) > 1 else name, f"seed={seed}")
        if name == "vlm-tiny" and len(seeds) > 1:
            yield trained(name, "vlm-blind", "data.blind=true")


def trained(name: str, output: str, *settings: str) -> Path:
    """The checkpoint of a recipe that runs now."""
    train(Path(f"recipes/{name}.toml"), [f"output=build/{output}", *settings])
    return Path("build") / output


def nearest_pixels() -> Row:
    """How often the drawing of a known vendor that is nearest in pixels, of 16 x 16 and their mean removed, has the
    name of the drawing of the one that is never seen."""
    pixels = Pixels(height=16, width=16, mean=(0.5,) * 3, std=(0.5,) * 3, filter="bilinear")

    def vendor(name: str) -> tuple[NDArray[np.float32], list[str]]:
        table = emoji_pairs(name, Silent())
        drawn = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
        images = [decode_image((table.parent / each["image"]).read_bytes(), pixels) for each in drawn]
        vectors = np.stack(images).reshape(len(images), -1).astype(np.float32)
        vectors -= vectors.mean(0)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), [each["text"] for each in drawn]

    unseen, wanted = vendor("facebook")
    known = [vendor(name) for name in ("apple", "google", "twitter")]
    nearest = (unseen @ np.concatenate([vectors for vectors, _ in known]).T).argmax(1)
    names = [name for _, each in known for name in each]
    right = float(np.mean([names[place] == name for place, name in zip(nearest, wanted, strict=True)]))
    return new_row(
        "vision_language", "emoji/nearest_in_pixels", right, "share", runs=1, baseline="guessing",
        baseline_value=1 / DRAWN,
    )  # fmt: skip


def int8_rows(report: dict[str, Any], name: str) -> list[Row]:
    """Exact answers after quantization beside those before, and how many times smaller the weights are."""
    first, last = report["stages"][0], report["stages"][-1]
    exact = last["record"]["images"]["exact"]
    sizes = [stage["size"]["bytes"] / 1e6 for stage in (last, first)]
    return [
        new_row(
            "vision_language", f"{name}/exact", exact["after"], "share", runs=1, baseline="the checkpoint",
            baseline_value=exact["before"],
        ),
        new_row(
            "vision_language", f"{name}/size", sizes[0], "MB", runs=1, baseline="the checkpoint",
            baseline_value=sizes[1],
        ),
    ]  # fmt: skip


def large(checkpoint: Path, artifact: Path) -> dict[str, LLMEngine]:
    """A decoder in both forms, with a vision transformer and a projection of SmolVLM-256M's shape before it whose
    weights are random: what they cost does not depend on them."""
    loaded = {name: load_model(folder) for name, folder in (("fp32", checkpoint), ("int8", artifact))}
    eyes = random_eyes(loaded["fp32"].config.hidden_size)
    sights = {"int8": rounded(eyes).sight, "fp32": eyes}
    settings = EngineConfig(max_model_len=512)
    for sight in sights.values():
        apply_image_invariance(sight)
    return {name: make_engine(replace(each, sight=sights[name]), settings) for name, each in loaded.items()}


def time_rows(engines: Mapping[str, LLMEngine], named: str, rounds: int) -> list[Row]:
    """Milliseconds of processor time until the first token and for a whole answer, medians of interleaved rounds."""
    found: dict[str, list[float]] = {}
    for turn in range(-1, rounds):  # the first warms caches and threads up
        image = _noise(turn + 2)
        for name, engine in engines.items():
            for when, tokens in (("new", 1), ("seen", 1)):
                spent = _processor_ms(engine, image, tokens)
                if turn >= 0:
                    found.setdefault(f"{name}/first_token/{when}", []).append(spent)
            spent = _processor_ms(engine, _noise(1000 + turn), ANSWER)
            if turn >= 0:
                found.setdefault(f"{name}/answer", []).append(spent)
    medians = {name: float(np.median(times)) for name, times in found.items()}
    pairs = [(f"{name}/first_token/seen", f"{name}/first_token/new") for name in engines]
    pairs += [(f"int8/{what}", f"fp32/{what}") for what in ("first_token/new", "answer")]
    return [
        new_row(
            "vision_language", f"{named}/{what}", medians[what], "ms of processor", runs=rounds, baseline=beside,
            baseline_value=medians[beside],
        )
        for what, beside in pairs
    ]  # fmt: skip


def _processor_ms(engine: LLMEngine, image: bytes, tokens: int) -> float:
    started = time.process_time()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    name = str(next(_NUMBERS))
    engine.add(Request(name, f"{engine.preparer.images.token}What is left of the bag?", params, images=[image]))
    while engine.has_work():
        engine.step()
    return (time.process_time() - started) * 1e3


def _noise(seed: int) -> bytes:
    """A PNG of 56 pixels a side."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def rows_of(created_by: dict[str, Any]) -> list[Row]:
    """The rows of a run, from what its checkpoint says of it."""
    recipe, found = created_by["recipe"], created_by["evaluation"]
    name = f"{Path(recipe['output']).name}/{recipe['steps']}_steps"
    if recipe["data"]["kind"] == "pairs":
        chances = {
            f"{way}_at_{most}": (most / DRAWN, "guessing")
            for way in ("image_to_text", "text_to_image")
            for most in (1, 10)
        }
    else:
        hears = recipe.get("model", {}).get("sound") is not None
        chances = {"exact": (1 / DIGITS, "guessing a digit") if hears else (1 / OTHERS, "guessing a class")}
    return [
        new_row(
            "vision_language",
            f"{name}/{metric}",
            found[metric],
            "share",
            runs=1,
            baseline=beside,
            baseline_value=chance if found[metric] else None,  # a row has no ratio of 0
        )
        for metric, (chance, beside) in chances.items()
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
