"""What the planner predicts: ZeRO's shrinking, errors against published runs, bubbles with and without balance.

All of it is computed, nothing is measured; `runs` is 0 in every row. Run by run_parallel.py.
"""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path

from lib.rows import Row, new_row
from penjing.core.config import load_recipe
from penjing.train.parallel.config import ParallelConfig
from penjing.train.pipeline.balancer import MicroBatchBalancer, Observation
from penjing.train.pipeline.schedules import Schedule, stage_ranks
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.pipeline.simulate import StageTimes, simulate
from penjing.train.pipeline.split import equal_split, split_layers, stage_costs
from penjing.train.plan.formulas import closed_bubble
from penjing.train.plan.memory import Run, parallel_memory
from penjing.train.plan.published import published
from penjing.train.recipe.recipe import TrainRecipe

NAME = "parallel"
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "decoder-1b.toml"


def zero_rows(dp: int = 8) -> list[Row]:
    """Parameters, gradients and optimiser of a rank (the article's 4× is ZeRO 1 at many ranks), and all its memory."""
    shape = decoder_shape(load_recipe(TrainRecipe, RECIPE).model)
    sizes = {
        zero: parallel_memory(shape, Run(ParallelConfig(dp=dp, zero=zero), dp, 2, 4, 4096, "selective"))
        for zero in (0, 1, 2, 3)
    }
    rows = []
    for zero, size in sizes.items():
        against = {"baseline": "ZeRO 0"} if zero else {}
        state, total = sizes[0].model_state if zero else None, sizes[0].total if zero else None
        name = f"zero_{zero}_dp_{dp}"
        rows += [
            _row(f"{name}_model_state", size.model_state / 2**30, "GiB", baseline_value=_gib(state), **against),
            _row(f"{name}_rank", size.total / 2**30, "GiB", baseline_value=_gib(total), **against),
        ]
    return rows


def published_rows() -> list[Row]:
    """Predicted speed and memory beside the reported ones, and the errors of those that no constant was fitted to."""
    rows = []
    errors: dict[str, list[float]] = {"speed": [], "memory": []}
    for row in published():
        predicted, reported = row.speed()
        unit = "tok/s/GPU" if row.tokens is not None else "TFLOP/s/GPU"
        if not row.fitted:
            errors["speed"].append(abs(predicted / reported - 1))
        source = ("torchtitan" if row.tokens is not None else "Megatron-LM") + (" (fitted)" if row.fitted else "")
        rows.append(_row(f"speed: {row.name}", predicted, unit, baseline=source, baseline_value=reported))
        memory = row.memory()
        if memory is not None:
            errors["memory"].append(abs(memory[0] / memory[1] - 1))
            rows.append(_row(f"memory: {row.name}", memory[0], "GiB", baseline="torchtitan", baseline_value=memory[1]))
    for what, found in errors.items():
        rows.append(_row(f"error of {what}, mean of {len(found)} published runs", statistics.mean(found), "share"))
        rows.append(_row(f"error of {what}, worst of {len(found)} published runs", max(found), "share"))
    return rows


def formula_rows(ranks: int = 8, micro_batches: int = 64) -> list[Row]:
    """The largest difference between simulated idle time and the papers' formulas, as a share of the step."""
    worst = 0.0
    schedules: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev")
    for schedule, weight in product(schedules, (1.0, 0.5)):
        if schedule == "zbv" and weight != 1.0:
            continue  # its formula is for equal thirds
        stages = len(stage_ranks(schedule, ranks))
        times = StageTimes((1.0,) * stages, (1.0,) * stages, (weight,) * stages)
        line = simulate(schedule, ranks, times, [1.0] * micro_batches)
        span = line.longest_span if schedule == "zbv" else line.makespan
        idle = span - max(line.busy)
        worst = max(worst, abs(idle - closed_bubble(schedule, ranks, 1.0, 1.0, weight)) / span)
    return [_row(f"simulated bubble against closed formulas, {len(schedules)} schedules", worst, "share of a step")]


def bubble_rows(ranks: int) -> list[Row]:
    """Bubbles of two uneven models: of Llama 3.1 405B's shape, and one whose middle layers were pruned by 30 %."""
    batch, size, layers = 26 * ranks, 8, 4 * ranks - 2
    large = [0.01, *[1.0] * layers, 0.66]
    pruned = [0.7 + 0.3 * abs(2 * layer / (layers - 1) - 1) for layer in range(layers)] + [0.66]
    rows: list[Row] = []
    for model, costs in (("405B shape", large), ("pruned middle", pruned)):
        fixed = 0.05 * sum(costs) / ranks  # of a stage, for every micro-batch: 5 % of a sample
        for schedule in ("1f1b", "interleaved"):
            rows += _balanced(model, schedule, ranks, costs, batch, size, fixed)
    return rows


def _balanced(
    model: str, schedule: Schedule, ranks: int, costs: list[float], batch: int, size: int, fixed: float
) -> list[Row]:
    stages = len(stage_ranks(schedule, ranks))
    equal = stage_costs(costs, equal_split(len(costs), stages))
    rates = stage_costs(costs, split_layers(costs, stages))
    balancer = MicroBatchBalancer(schedule, ranks, batch, size)
    start = balancer.decide().size
    times = StageTimes.of_costs([fixed + rate * start for rate in equal])
    before = simulate(schedule, ranks, times, [1.0] * (batch // start))
    for _ in range(3):
        chosen = balancer.decide().size
        seen = Observation(
            chosen, tuple(fixed + rate * chosen for rate in rates), tuple(2 * (fixed + rate * chosen) for rate in rates)
        )
        balancer = balancer.observe(seen)
    split, after = balancer.predict(start), balancer.predict(balancer.size)
    name, base = f"bubble: {model}, {schedule}, {ranks} ranks", f"equal split, micro-batch {start}"
    return [
        _row(f"{name}, {base}", before.bubble, "share"),
        _row(f"{name}, split by cost", split.bubble, "share", baseline=base, baseline_value=before.bubble),
        _row(
            f"{name}, micro-batch {balancer.size}", after.bubble, "share", baseline=base, baseline_value=before.bubble
        ),
        _row(
            f"step: {model}, {schedule}, {ranks} ranks, balanced", after.makespan, "s", baseline=base,
            baseline_value=before.makespan,
        ),
    ]  # fmt: skip


def _gib(size: float | None) -> float | None:
    return None if size is None else size / 2**30


def _row(
    metric: str, value: float, unit: str, *, baseline: str | None = None, baseline_value: float | None = None
) -> Row:
    return new_row(NAME, metric, value, unit, runs=0, baseline=baseline, baseline_value=baseline_value)
