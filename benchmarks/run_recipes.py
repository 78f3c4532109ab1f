"""Rows of whole training runs: what a recipe reaches on held-out data, how fast, and in how much memory.

python benchmarks/run_recipes.py                                   # recipes/decoder-tiny.toml and resnet-fashion.toml
python benchmarks/run_recipes.py recipes/decoder-tiny.toml --force # train again, which gives its seconds too

A run that is complete is kept: then there is no row of its seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.config import load_recipe
from penjing.core.manifest import MANIFEST_NAME, read_manifest
from penjing.core.progress import progress_bar
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.run import train

RECIPES = [Path("recipes/decoder-tiny.toml"), Path("recipes/resnet-fashion.toml")]
UNITS = {"loss": "nats", "accuracy": "share"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", type=Path, nargs="*", default=RECIPES)
    parser.add_argument("--force", action="store_true", help="train again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    rows = [row for path in arguments.recipes for row in recipe_rows(path, arguments.force)]
    append("recipes", rows, arguments.results)
    return 0


def recipe_rows(path: Path, force: bool) -> list[Row]:
    """Rows named RECIPE_METRIC; the recipe is trained unless its output is there."""
    recipe, name = load_recipe(TrainRecipe, path), path.stem.replace("-", "_")
    rows: list[Row] = []
    if force or not (recipe.output / MANIFEST_NAME).exists():
        began = time.perf_counter()
        with progress_bar() as progress:
            train(path, force=force, progress=progress)
        rows.append(new_row("recipes", f"{name}_seconds", time.perf_counter() - began, "s", runs=1))
    evaluation = read_manifest(recipe.output).created_by["evaluation"]
    rows += [
        new_row("recipes", f"{name}_held_out_{metric}", value, UNITS.get(metric, "nats"), runs=1)
        for metric, value in evaluation.items()
    ]
    lines = (recipe.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [values for values in map(json.loads, lines) if "step_s" in values]
    for metric, unit in (("tokens_per_s", "tok/s"), ("images_per_s", "images/s"), ("io_wait", "share")):
        if values := [values[metric] for values in steps if metric in values]:
            rows.append(new_row("recipes", f"{name}_{metric}", median(values), unit, runs=len(values)))
    memory = max(values["memory_bytes"] for values in steps)
    rows.append(new_row("recipes", f"{name}_memory", memory, "bytes", runs=1))
    return rows


if __name__ == "__main__":
    raise SystemExit(guarded(main))
