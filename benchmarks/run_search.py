"""Measure a search for settings beside the full grid that it saves; appends rows.

    python benchmarks/run_search.py                        # decoder-tiny on short windows: under an hour
    python benchmarks/run_search.py --work build/search    # the same; what is done is kept there, and gone on with
    python benchmarks/run_search.py --steps 1200 --set data.sequence_length=256 --set data.batch_size=8   # as it is

Learning rates at equal ratios are searched by successive halving, then every one of them is run to the end. Steps are
counted, not seconds, so that a busy machine does no harm. `loss` is the held-out loss of the learning rate that the
search chose, beside that of the grid's best; `learning_rate` likewise; `steps` is what the search ran beside the grid.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from lib.models import say
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.config import dump_toml, inline_toml
from penjing.core.files import atomic_write_text
from penjing.train.run import train
from penjing.train.search.halving import cost
from penjing.train.search.search import run_search
from penjing.train.search.state import SearchState

KEY, LOW, HIGH = "learning_rate.peak", 1e-4, 1e-1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="decoder-tiny", help="a training recipe")
    parser.add_argument("--steps", type=int, default=300, help="of a whole run")
    parser.add_argument("--trials", type=int, default=12, help="learning rates of the grid")
    parser.add_argument("--workers", type=int, default=1, help="trials at a time")
    parser.add_argument("--set", action="append", dest="overrides", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--work", type=Path, help="folder of all runs, which is kept; another run goes on from it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    overrides = arguments.overrides or ["data.sequence_length=128", "data.batch_size=4"]
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        state, grid = measure(
            arguments.recipe, arguments.steps, arguments.trials, overrides, work, workers=arguments.workers
        )
    append("search", search_rows(state, grid), arguments.results)
    return 0


def measure(
    recipe: str, steps: int, trials: int, overrides: list[str], folder: Path, *, workers: int = 1
) -> tuple[SearchState, dict[int, float]]:
    """A finished search, and the loss of a whole run with each trial's settings.

    `folder` keeps both: a search goes on by itself, runs of the grid that are in grid.json are not run again.
    """
    settings = dict(override.split("=", 1) for override in overrides)
    start = LOW * (HIGH / LOW) ** ((trials // 2) / (trials - 1))  # one of the grid, so that no trial is added
    values = {
        "base": recipe,
        "output": str(folder / "search"),
        "trials": trials,
        "workers": workers,
        "first": max(steps // 16, 1),
        "factor": 4,
        "sampler": "grid",
        "settings": {"steps": steps, KEY: start} | {key: int(value) for key, value in settings.items()},
        "space": {KEY: [LOW, HIGH]},
    }
    (folder / "search.toml").write_text(dump_toml(values))
    state = run_search(folder / "search.toml")
    done = folder / "grid.json"
    grid = {int(number): loss for number, loss in json.loads(done.read_text()).items()} if done.exists() else {}
    for number, trial in enumerate(state.trials):
        if number in grid:
            continue
        if number == state.winner:
            grid[number] = trial.value(steps, "loss")
        else:
            changes = [f"output={inline_toml(str(folder / f'grid-{number}'))}", f"{KEY}={trial.settings[KEY]}"]
            grid[number] = train(Path(recipe), [*overrides, f"steps={steps}", *changes], resume="auto")["loss"]
        atomic_write_text(done, json.dumps(grid))
        say(f"{KEY} {trial.settings[KEY]:.2e}: {grid[number]:.4f}")
    return state, grid


def search_rows(state: SearchState, grid: dict[int, float]) -> list[Row]:
    """The rows of a finished search and its grid."""
    assert state.winner is not None
    steps = state.plan[-1].steps
    best = min(grid, key=lambda number: grid[number])
    chosen, right = (float(state.trials[number].settings[KEY]) for number in (state.winner, best))
    beside = f"full grid of {len(grid)}"
    return [
        new_row("search", "loss", grid[state.winner], "nats", runs=1, baseline=beside, baseline_value=grid[best]),
        new_row("search", "learning_rate", chosen, "peak", runs=1, baseline=beside, baseline_value=right),
        new_row(
            "search", "steps", cost(state.plan), "steps", runs=1, baseline=beside, baseline_value=len(grid) * steps
        ),
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
