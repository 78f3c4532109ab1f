"""What networks of images and text reach on what they have never seen; appends rows.

    python benchmarks/run_vision_language.py       # trains both recipes, whose inputs their first lines make
    python benchmarks/run_vision_language.py --trained build/clip-emoji build/vlm-tiny   # runs that are there already

The figures are of the recipe's last evaluation: retrieval of a vendor's emoji by two towers, and exact answers about
scenes of Fashion-MNIST. Each stands beside what guessing reaches. No time is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.manifest import read_manifest
from penjing.train.run import train

RECIPES = ("clip-emoji", "vlm-tiny")
DRAWN = 1860  # emoji that the third vendor draws, each with a name of its own
OTHERS = 9  # classes of Fashion-MNIST that a thing's neighbour may be of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", type=Path, nargs="+", help="checkpoints of finished runs of the recipes")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    folders = arguments.trained or [trained(name) for name in RECIPES]
    rows = [row for folder in folders for row in rows_of(read_manifest(folder).created_by)]
    append("vision_language", rows, arguments.results)
    return 0


def trained(name: str) -> Path:
    """The checkpoint of a recipe that runs now."""
    train(Path(f"recipes/{name}.toml"))
    return Path("build") / name


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
