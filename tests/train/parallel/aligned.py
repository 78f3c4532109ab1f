"""Each process of a world of two that trains what aligns a model: a list of runs on a mesh, each beside one process.

Started by `worlds.py` as a script: RANK, WORLD_SIZE and a folder with cases.json, a recipe and its data. Rank 0 leaves
results.json there.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from markupsafe import Markup
from safetensors.torch import load_file

from penjing.core.progress import Silent
from penjing.train import run as train_run
from penjing.train.align import page
from penjing.train.checks import check_machine
from penjing.train.families.base import build_task
from penjing.train.parallelize import form_mesh
from penjing.train.plan.estimate import MemoryEstimate
from penjing.train.processes.stop import InterruptedRunError
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe

Outcome = tuple[dict[str, float], list[dict[str, Any]], dict[str, torch.Tensor]]


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


# What the loop and the objectives say of a step, and not the clock.
CLOCKED = ("_per_s", "rollout_share", "step_s", "mfu", "io_wait", "memory", "recovered_s")


def run(
    recipe: Path,
    settings: list[str],
    world: World,
    resume: str = "never",
    stop_after: int = 0,
    progress: Silent = Silent(),  # noqa: B008
) -> Outcome:
    """A run as `train_task` makes it, in a world that has met already: its last evaluation, and in the main process
    its records and the tensors that it exported. Steps are counted from 1; 0 stops nowhere."""
    settled = load_train_recipe(recipe, settings)
    check_machine(settled, world.size, is_new=resume == "never")
    task = build_task(settled, Silent())
    steps = iter(range(1, 1000))
    stop: Callable[[], bool] = lambda: next(steps) == stop_after  # noqa: E731
    joined = form_mesh(world, settled.parallel, progress)
    results = train_run._Run(settled, task, joined, Silent()).train(
        resume=resume, accept_changes=False, force=True, profile=False, until=None, stop_requested=stop, began=0.0,
        command="tests",
    )  # fmt: skip
    if not world.is_main:
        return results, [], {}
    lines = (settled.run_folder / "metrics.jsonl").read_text().splitlines()
    # An alarm may ring that the data come late, where a machine is busy.
    told = [line for line in map(json.loads, lines) if "alarm" not in line]
    records = [
        {key: value for key, value in line.items() if not key.endswith(CLOCKED) and "memory" not in key}
        for line in told
    ]
    return results, [record for record in records if len(record) > 1], load_file(settled.output / "model.safetensors")


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of two tensors of one name, for each name that both have."""
    return {name: (one[name] - other[name]).abs().max().item() for name in sorted(one.keys() & other.keys())}


def apart(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Of each quantity the largest difference between two lists of records, in shares of what is above 1."""
    differences: dict[str, float] = {}
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys(), (one, other)
        for name in one:
            a, b = one[name], other[name]
            if isinstance(a, float) and isinstance(b, float):
                differences[name] = max(differences.get(name, 0.0), abs(a - b) / max(abs(b), 1.0))
            else:
                assert a == b, (name, a, b)
    return differences


@functools.cache
def alone(recipe: Path, settings: tuple[str, ...], output: Path) -> Outcome:
    """The run of one process, the same for every mesh."""
    return run(recipe, [*settings, f"output={output}"], World())


def compare(folder: Path, case: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The run of `case` here, beside one process; where the case says so also one that is stopped after its second step
    and resumed, beside the one that was not."""
    recipe, settings = folder / case["recipe"], [*case["settings"], *case["mesh"]]
    here, again, single = (folder / case["folder"] / name for name in ("here", "again", "alone"))
    world, notes = World(rank, size), Notes()
    results, records, weights = run(recipe, [*settings, f"output={here}"], world, progress=notes)
    found: dict[str, Any] = {"mesh": notes.lines}
    if case["resumed"]:
        try:
            run(recipe, [*settings, f"output={again}"], world, stop_after=2)
            raise AssertionError("it was not stopped")
        except InterruptedRunError:
            world.barrier()
        others = run(recipe, [*settings, f"output={again}"], world, resume="auto")
        same = torch.tensor(float(others[0] == results))
        dist.all_reduce(same, dist.ReduceOp.MIN)  # in every process
        found["resumed"] = {"evaluation": bool(same), "records": others[1] == records}
        found["resumed"]["weights"] = others[2].keys() == weights.keys() and not any(
            furthest(others[2], weights).values()
        )
    if rank:
        return {}
    expected = alone(recipe, tuple(case["settings"]), single)
    before = load_file(folder / "base" / "model.safetensors")
    return found | {
        "records": apart(records, expected[1]),
        "evaluation": apart([dict(results)], [dict(expected[0])]),
        "names": weights.keys() == expected[2].keys(),
        "weights": max(furthest(weights, expected[2]).values()),
        "moved": furthest(before, weights),
    }


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    os.chdir(folder)  # what a case names lies there
    # What is counted and measured before a run, and drawn after it, says nothing of what is learnt, and takes most of
    # one so small.
    page.figure = lambda draw, width, height: Markup("")
    train_run.peak_flops = lambda device, dtype: (1e12, "tests")
    train_run.estimate_memory = lambda *args, **kwargs: MemoryEstimate(0, 0, 0, 0, 0, 0)
    train_run.model_flops = lambda build, objective, batch: 1.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        try:
            results[name] = compare(folder, case, rank, size)
            dist.barrier()
        except Exception:
            print(f"case {name} on rank {rank}", flush=True)
            traceback.print_exc()
            os._exit(1)  # the others wait in a collective: whoever started them ends them
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
