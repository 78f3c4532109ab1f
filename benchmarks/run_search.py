"""Measure a search for settings beside the full grid that it saves; appends rows.

    python benchmarks/run_search.py                        # decoder-tiny on short windows: under an hour
    python benchmarks/run_search.py --work build/search    # the same; what is done is kept there, and gone on with
    python benchmarks/run_search.py --steps 1200 --set data.sequence_length=256 --set data.batch_size=8   # as it is

    python benchmarks/run_search.py --only ray             # searches on a Ray cluster that loses a node

Learning rates at equal ratios are searched by successive halving, then every one of them is run to the end. Steps are
counted, not seconds, so that a busy machine does no harm. With `--only ray` nothing of that runs: two nodes of a Ray
cluster are started on this machine (`pip install 'penjing[ray]'`), of which one is killed while it works, and what a
joint search of thirty combinations and more finds, and what a search for learning rates finds, is held against the same
searches without Ray. `ray/front` is the share of the rows and points of the former that are equal to the last bit,
`ray/losses` that of the latter's losses. `loss` is the held-out loss of the learning rate that the
search chose, beside that of the grid's best; `learning_rate` likewise; `steps` is what the search ran beside the grid.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from lib.models import say
from lib.rows import RESULTS, Row, append, new_row

from penjing.compress.search.search import run_joint_search
from penjing.core.cli import guarded
from penjing.core.config import dump_toml, inline_toml
from penjing.core.files import atomic_write_text
from penjing.core.progress import PlainProgress
from penjing.train.run import train
from penjing.train.search.halving import cost
from penjing.train.search.search import run_search
from penjing.train.search.state import SearchState

KEY, LOW, HIGH = "learning_rate.peak", 1e-4, 1e-1
STORE_BYTES = 80_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="decoder-tiny", help="a training recipe")
    parser.add_argument("--steps", type=int, default=300, help="of a whole run")
    parser.add_argument("--trials", type=int, default=12, help="learning rates of the grid")
    parser.add_argument("--workers", type=int, default=1, help="trials at a time")
    parser.add_argument("--set", action="append", dest="overrides", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--work", type=Path, help="folder of all runs, which is kept; another run goes on from it")
    parser.add_argument("--finalists", type=int, default=1, help="trials that run to the end at least")
    parser.add_argument("--only", choices=("grid", "ray"), default="grid")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    overrides = arguments.overrides or ["data.sequence_length=128", "data.batch_size=4"]
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        if arguments.only == "ray":
            for row in on_ray(work):
                append("search", [row], arguments.results)
        else:
            state, grid = measure(
                arguments.recipe,
                arguments.steps,
                arguments.trials,
                overrides,
                work,
                workers=arguments.workers,
                finalists=arguments.finalists,
            )
            append("search", search_rows(state, grid), arguments.results)
    return 0


def measure(
    recipe: str, steps: int, trials: int, overrides: list[str], folder: Path, *, workers: int = 1, finalists: int = 1
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
        "finalists": finalists,
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


def on_ray(folder: Path) -> Iterator[Row]:
    """The rows of searches on a cluster that loses a node, each as it is measured."""
    network = folder / "network"
    if not network.exists():
        short = ["model.width=8", "steps=40", "evaluation.every=0", "data.batch_size=32"]
        train(Path("resnet-fashion"), [*short, f"output={inline_toml(str(network))}"])
    joint: dict[str, Any] = {"base": "resnet-fashion-int8", "combinations": 30, "points": 4}
    joint["settings"] = {"model": str(network), "data.images": 256, "steps.0.round_to": 2}
    rates: dict[str, Any] = {
        "base": "decoder-tiny",
        "trials": 3,
        "first": 4,
        "workers": 2,
        "space": {KEY: [1e-4, 1e-2]},
    }
    rates["settings"] = {"steps": 8, "data.sequence_length": 32, "data.batch_size": 2, "evaluation.samples": 8}
    cluster = TwoNodes()
    try:
        far = {"address": cluster.address, "resources": {"trial": 1}}
        for name, values in (("joint", joint), ("rates", rates)):
            for place, more in (("here", {}), ("ray", {"ray": far})):
                text = dump_toml(values | more | {"output": str(folder / f"{name}-{place}")})
                (folder / f"{name}-{place}.toml").write_text(text)
        with cluster.killed_when(lambda: len([*folder.glob(".joint-ray.work/point_*.json")]) >= 5):
            found = run_joint_search(folder / "joint-ray.toml", progress=PlainProgress())
        here = run_joint_search(folder / "joint-here.toml", progress=PlainProgress())
        pairs = [*zip(here["rows"], found["rows"], strict=True), *zip(here["front"], found["front"], strict=True)]
        yield equal_row("ray/front", sum(one == other for one, other in pairs), len(pairs))
        with cluster.killed_when(lambda: len([*folder.glob("rates-ray/trials/*/run/metrics.jsonl")]) >= 2):
            away = run_search(folder / "rates-ray.toml", progress=PlainProgress())
        own = run_search(folder / "rates-here.toml", progress=PlainProgress())
        trials = [*zip(own.trials, away.trials, strict=True)]
        equal = sum(one.evaluations == other.evaluations for one, other in trials)
        yield equal_row("ray/losses", equal, len(trials))
    finally:
        cluster.shutdown()


def equal_row(metric: str, equal: int, count: int) -> Row:
    """How many of so many things are those of the same search without Ray, to the last bit."""
    beside = "the same without Ray"
    return new_row("search", metric, equal / count, "share equal", runs=count, baseline=beside, baseline_value=1.0)


class TwoNodes:
    """A head that takes no tasks, and two nodes of one processor each."""

    def __init__(self) -> None:
        utils: Any = import_module("ray.cluster_utils")
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = utils.Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._node(), self._node()]
        self.address = str(self._cluster.address)

    @contextmanager
    def killed_when(self, so: Callable[[], bool]) -> Iterator[None]:
        """One of two nodes ends as in a crash as soon as something is so; another takes its place before."""
        while len(self._nodes) < 2:
            self._nodes.append(self._node())
        ended = threading.Event()

        def watch() -> None:
            while not so() and not ended.wait(0.02):
                pass
            if not ended.is_set():
                self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)
                say("a node was killed")

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def shutdown(self) -> None:
        """End it."""
        import_module("ray").shutdown()
        self._cluster.shutdown()

    def _node(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources={"trial": 1})


if __name__ == "__main__":
    sys.exit(guarded(main))
