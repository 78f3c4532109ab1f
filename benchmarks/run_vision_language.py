"""What networks of images and text reach on what they have never seen; appends rows.

    python benchmarks/run_vision_language.py       # trains both recipes, whose inputs their first lines make
    python benchmarks/run_vision_language.py --seeds 1 2 3      # each from three seeds, and a decoder that is blind
    python benchmarks/run_vision_language.py --trained build/clip-emoji build/vlm-tiny   # runs that are there already
    python benchmarks/run_vision_language.py --pixels           # what no network reaches: the nearest drawing in pixels

The figures are of the recipe's last evaluation: retrieval of a vendor's emoji by two towers, and exact answers about
scenes of Fashion-MNIST. Each stands beside what guessing reaches. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lib.rows import RESULTS, Row, append, new_row
from numpy.typing import NDArray

from penjing.core.cli import guarded
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import decode_image
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from penjing.train.data.emoji import emoji_pairs
from penjing.train.run import train

RECIPES = ("clip-emoji", "vlm-tiny")
DRAWN = 1860  # emoji that the third vendor draws, each with a name of its own
OTHERS = 9  # classes of Fashion-MNIST that a thing's neighbour may be of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="seeds of the runs")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES, help="what is trained")
    parser.add_argument("--pixels", action="store_true", help="train nothing, compare pixels of emoji")
    parser.add_argument("--trained", type=Path, nargs="+", help="checkpoints of finished runs of the recipes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
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
    name of the third vendor's."""
    pixels = Pixels(height=16, width=16, mean=(0.5,) * 3, std=(0.5,) * 3, filter="bilinear")

    def vendor(name: str) -> tuple[NDArray[np.float32], list[str]]:
        table = emoji_pairs(name, Silent())
        drawn = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
        images = [decode_image((table.parent / each["image"]).read_bytes(), pixels) for each in drawn]
        vectors = np.stack(images).reshape(len(images), -1).astype(np.float32)
        vectors -= vectors.mean(0)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), [each["text"] for each in drawn]

    unseen, wanted = vendor("facebook")
    known = [vendor(name) for name in ("google", "twitter")]
    nearest = (unseen @ np.concatenate([vectors for vectors, _ in known]).T).argmax(1)
    names = [name for _, each in known for name in each]
    right = float(np.mean([names[place] == name for place, name in zip(nearest, wanted, strict=True)]))
    return new_row(
        "vision_language", "emoji/nearest_in_pixels", right, "share", runs=1, baseline="guessing",
        baseline_value=1 / DRAWN,
    )  # fmt: skip


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
        chances = {"exact": (1 / OTHERS, "guessing a class")}
    return [
        new_row(
            "vision_language",
            f"{name}/{metric}",
            found[metric],
            "share",
            runs=1,
            baseline=beside,
            baseline_value=chance,
        )
        for metric, (chance, beside) in chances.items()
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
