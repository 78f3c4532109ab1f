"""Measure parallel training: traffic, memory, bubbles, overlap, overhead, recovery, curves; check the planner.

    python benchmarks/run_parallel.py                       # all pieces; appends to benchmarks/results/parallel.jsonl
    python benchmarks/run_parallel.py traffic memory        # these pieces
    python benchmarks/run_parallel.py --quick pipeline      # shorter, shows the rows and writes none
    python benchmarks/run_parallel.py curves --keep build/curves   # goes on with the runs that are there
    python benchmarks/run_parallel.py --list

Bytes and simulations are exact wherever this runs. Times of several processes on one machine's cores say what penjing
adds, not what a cluster gains; only `pipeline` and `shares`, whose layers sleep, show what a cluster would.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from lib.parallel_commands import curves, overhead, overlap, recovery
from lib.parallel_computed import bubble_rows, formula_rows, published_rows, zero_rows
from lib.parallel_ranks import run_ranks, settled
from lib.rows import RESULTS, Row, append, new_row, show

from penjing.core.cli import guarded
from penjing.core.errors import ConfigError
from penjing.train.parallel.config import Schedule
from penjing.train.pipeline.simulate import StageTimes, simulate
from penjing.train.pipeline.split import equal_split, split_layers, stage_costs

NAME = "parallel"


def main() -> int:
    """Run the pieces that were asked for and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", help=f"of {', '.join(PIECES)}; all by default")
    parser.add_argument("--quick", action="store_true", help="shorter runs, rows are not written")
    parser.add_argument("--list", action="store_true", help="say what the pieces measure, and stop")
    parser.add_argument(
        "--keep", type=Path, help="the folder for the runs of `curves`, which go on when it is run again"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder for the rows")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:10} {(piece.__doc__ or '').splitlines()[0]}" for name, piece in PIECES.items()))
        return 0
    for name in arguments.pieces:
        if name not in PIECES:
            raise ConfigError(f"piece {name!r} is unknown; choose of {', '.join(PIECES)}")
    pieces = PIECES | {"curves": partial(curves, keep=arguments.keep)}
    rows = [row for name in arguments.pieces or pieces for row in pieces[name](arguments.quick)]
    if arguments.quick:
        show(rows)
    else:
        append(NAME, rows, arguments.results)
    return 0


def planner(quick: bool) -> list[Row]:
    """The planner's predictions beside published runs, with their errors; ZeRO's shrinking; closed formulas."""
    return [*published_rows(), *zero_rows(), *formula_rows()]


def bubble(quick: bool) -> list[Row]:
    """Simulated bubbles of 32 stages, with equal layers, split by cost, and with micro-batches resized."""
    return bubble_rows(8 if quick else 32)


def traffic(quick: bool) -> list[Row]:
    """Bytes of gradients that a process sends in a step, and of parameters that it collects, by their format."""
    rows = []
    for mesh, ways in (({"dp": 2}, ("float32", "int8", "powersgd")), ({"zero": 2}, ("float32", "int8"))):
        plain: float | None = None
        for way in ways:
            sent = run_ranks(2, {"kind": "traffic", "parallel": mesh | {"gradients": way}})["bytes"]
            name = f"traffic: {' '.join(f'{key} {value}' for key, value in mesh.items())}, {way}"
            baseline = None if plain is None else "float32"
            rows.append(new_row(NAME, name, sent, "bytes", runs=1, baseline=baseline, baseline_value=plain))
            plain = plain or sent
    whole: float | None = None
    for mode in ("fp32", "bf16"):
        gathered = run_ranks(2, {"kind": "gathers", "parallel": {"zero": 3}, "mode": mode})["bytes"]
        name = f"traffic: zero 3, parameters collected in {mode}"
        baseline = None if whole is None else "fp32"
        rows.append(new_row(NAME, name, gathered, "bytes", runs=1, baseline=baseline, baseline_value=whole))
        whole = whole or gathered
    return rows


def memory(quick: bool) -> list[Row]:
    """Bytes of parameters, gradients and AdamW's state that a process of four holds at an update, by ZeRO level; and
    the most of a step with logits whole and split."""
    rows, whole = [], None
    for zero, shards in ((0, None), (1, None), (2, None), (3, None), (3, 2)):
        held = run_ranks(4, {"kind": "memory", "parallel": {"dp": 4, "zero": zero, "shards": shards}})
        total = float(sum(held.values()))
        baseline = None if whole is None else "ZeRO 0"
        name = f"memory: ZeRO {zero}{f' over {shards}' if shards else ''}, 4 processes, held at an update"
        rows.append(new_row(NAME, name, total, "bytes", runs=1, baseline=baseline, baseline_value=whole))
        whole = whole or total
    gathered: float | None = None
    for all_logits in (True, False):
        most = run_ranks(2, {"kind": "logits", "parallel": {"tp": 2}, "whole": all_logits})["bytes"]
        name = f"memory: a step of 2 tensor parallel processes, logits {'whole' if all_logits else 'split'}"
        baseline = None if gathered is None else "whole"
        rows.append(new_row(NAME, name, most, "bytes", runs=1, baseline=baseline, baseline_value=gathered))
        gathered = gathered or most
    return rows


def pipeline(quick: bool) -> list[Row]:
    """Four real stages of sleeping layers, some twice as heavy: split equally, by cost, and resized."""
    rates, fixed, stages = (0.004,) * 4 + (0.002,) * 8, 0.05, 4
    batch, size = (32, 8) if quick else (160, 16)
    schedules: tuple[Schedule, ...] = ("1f1b",) if quick else ("gpipe", "1f1b")
    bounds = {"equal layers": equal_split(len(rates), stages), "split by cost": split_layers(rates, stages)}
    rows = []
    for schedule in schedules:
        shown = f"{schedule}, 4 stages of sleeping layers"
        first, found = ("", 0.0, 0.0), {}
        for split, cut in bounds.items():
            job = {
                "kind": "pipeline", "rates": rates, "fixed": fixed, "micro_batch": size,
                "micro_batches": batch // size, "steps": 2 if split == "equal layers" else 8,
                "parallel": {
                    "pp": stages, "schedule": schedule, "balance": True,
                    "stage_layers": [end - begin for begin, end in pairwise(cut)],
                },
            }  # fmt: skip
            found = run_ranks(stages, job)
            times = StageTimes.of_costs([(fixed + size) * cost for cost in stage_costs(rates, cut)])
            line = simulate(schedule, stages, times, [1.0] * (batch // size))
            # The first step tries shapes out; the second is of the first size too.
            seconds, bubble = found["seconds"][1], found["bubble"][1]
            what = f"{shown}, {split}, micro-batch {size}"
            rows += [
                _pipeline(f"step: {what}", seconds, "s", "simulated", line.makespan),
                _pipeline(f"bubble: {what}", bubble, "share", "simulated", line.bubble),
            ]
            if split == "equal layers":
                first = f"{split}, micro-batch {size}", seconds, bubble
        what = f"{shown}, split by cost, resized to {found['micro_batch'][-1]}"
        rows += [
            _pipeline(f"bubble: {what}", settled(found["bubble"]), "share", first[0], first[2]),
            _pipeline(f"step: {what}", settled(found["seconds"]), "s", first[0], first[1]),
        ]
    return rows


def shares(quick: bool) -> list[Row]:
    """Two sleeping processes, one at half speed: samples a second with equal shares and with unlike ones, beside the
    sum of what each reaches alone."""
    rates = (0.002, 0.004) if quick else (0.01, 0.02)
    job = {"kind": "shares", "batch": 48, "micro_batch": 2, "steps": 8 if quick else 14, "unlike": False}
    speeds = [job["batch"] / settled(run_ranks(1, job | {"rates": [rate]})["seconds"]) for rate in rates]
    rows = []
    for unlike in (False, True):
        found = run_ranks(2, job | {"rates": rates, "unlike": unlike})
        name = f"parallel.shares = {'auto' if unlike else 'equal'}, one of two processes at half speed"
        reached = job["batch"] / settled(found["seconds"])
        rows.append(
            new_row(
                NAME,
                f"{name}: samples",
                reached,
                "1/s",
                runs=3,
                baseline="sum of each alone",
                baseline_value=sum(speeds),
            )
        )
    return rows


def _pipeline(metric: str, value: float, unit: str, baseline: str, baseline_value: float) -> Row:
    return new_row(NAME, metric, value, unit, runs=1, baseline=baseline, baseline_value=baseline_value)


PIECES: dict[str, Callable[[bool], list[Row]]] = {
    "planner": planner,
    "bubble": bubble,
    "traffic": traffic,
    "memory": memory,
    "pipeline": pipeline,
    "shares": shares,
    "overlap": overlap,
    "overhead": overhead,
    "recovery": recovery,
    "curves": curves,
}


if __name__ == "__main__":
    sys.exit(guarded(main))
