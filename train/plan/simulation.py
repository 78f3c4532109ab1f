"""`penjing train simulate`: a recipe's model through a pipeline of many ranks, as table and figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.errors import ConfigError
from penjing.core.progress import Progress, Silent
from penjing.train.pipeline.measure import measure_layers
from penjing.train.pipeline.schedules import Schedule, chunks_of, known_schedule
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.pipeline.simulate import StageTimes, Timeline, simulate
from penjing.train.pipeline.split import equal_split, split_layers, stage_costs
from penjing.train.plan.formulas import closed_bubble
from penjing.train.plan.hardware import hardware
from penjing.train.plan.timeline import draw_timeline
from penjing.train.recipe.data import TextData
from penjing.train.recipe.load import load_train_recipe


def simulate_recipe(
    recipe_path: Path,
    overrides: list[str] | None = None,
    *,
    stages: int,
    schedule: str,
    micro_batches: int | None = None,
    chunks: int | None = None,
    device: str = "h100",
    measure: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Simulate one step of the recipe's model over a pipeline, layers split equally and by cost.

    Args:
        stages: ranks of the pipeline.
        schedule: see `schedules`; `chunks` of each rank for interleaved and zb.
        micro_batches: of a step; by default 4 for each rank.
        device: whose speed turns FLOPs into seconds.
        measure: time the layers here instead.
        out: an SVG of the better split's timeline.

    Returns:
        What the table shows: for each split the bubble, seconds, heaviest stage and activations alive.

    Raises:
        ConfigError: a recipe without decoder, an unknown schedule, or numbers that it cannot run.
    """
    kind = known_schedule(schedule)
    if stages < 1:
        raise ConfigError(f"--stages {stages}: a pipeline has 1 or more")
    progress = progress or Silent()
    recipe = load_train_recipe(recipe_path, overrides)
    shape = decoder_shape(recipe.model)
    if not isinstance(recipe.data, TextData):
        raise ConfigError("simulating needs data.sequence_length; give a recipe with data.kind = 'text'")
    length = recipe.data.sequence_length
    samples = recipe.data.micro_batch if isinstance(recipe.data.micro_batch, int) else 1
    micro_batches = 4 * stages if micro_batches is None else micro_batches
    if measure:
        forward, backward = measure_layers(recipe.model, length, samples, progress)  # type: ignore[arg-type]
        send, origin = 0.0, "measured here, float32"
    else:
        gpu = hardware(device)
        rate = gpu.flops * gpu.efficiency / (length * samples)
        forward = tuple(cost / rate for cost in shape.costs(length))
        backward = tuple(2 * cost for cost in forward)
        send = 2 * shape.hidden * length * samples / (gpu.network * gpu.link_share)
        origin = f"FLOPs at {gpu.efficiency:.0%} of an {gpu.name}, sends at {gpu.link_share:.0%} of its network"
    total = stages * chunks_of(kind, chunks)
    if total > len(forward):
        parts = -(-total // len(forward))
        progress.note(
            f"{len(forward)} layers are fewer than {total} stages: each is cut into {parts} equal parts here, which no "
            "run can do; set model.num_hidden_layers for a deeper model"
        )
        forward = tuple(cost / parts for cost in forward for _ in range(parts))
        backward = tuple(cost / parts for cost in backward for _ in range(parts))
    result: dict[str, Any] = {
        "schedule": kind,
        "ranks": stages,
        "chunks": total // stages,
        "micro_batches": micro_batches,
        "micro_batch": samples,
        "costs": origin,
    }
    lines: dict[str, Timeline] = {}
    splits = {"equal": equal_split(len(forward), total), "by_cost": split_layers(forward, total)}
    for name, bounds in splits.items():
        f, b = stage_costs(forward, bounds), stage_costs(backward, bounds)
        half = tuple(cost / 2 for cost in b)
        lines[name] = simulate(kind, stages, StageTimes(f, half, half, send=send), [1.0] * micro_batches, chunks=chunks)
        result[name] = _row(lines[name], f)
    result["formula_for_equal_stages"] = _formula(kind, stages, micro_batches, total // stages)
    if out is not None:
        best = min(lines, key=lambda name: lines[name].makespan)
        title = f"{kind}, {stages} ranks, {micro_batches} micro-batches: bubble {lines[best].bubble:.1%}"
        result["figure"] = str(draw_timeline(lines[best], out, title))
    return result


def _row(line: Timeline, forward: tuple[float, ...]) -> dict[str, Any]:
    return {
        "bubble": round(line.bubble, 4),
        "step_s": float(f"{line.makespan:.4g}"),
        "heaviest_stage_over_mean": round(max(forward) * len(forward) / sum(forward), 3),
        "peak_activations": max(line.peak_live),  # micro-batches × chunks on the rank that holds most
    }


def _formula(schedule: Schedule, ranks: int, micro_batches: int, chunks: int) -> float:
    """The paper's share of idle time with equal stages, backward twice the forward, and free sends."""
    idle = closed_bubble(schedule, ranks, 1.0, 1.0, 1.0)
    if schedule == "zbv":  # the ranks begin one after the other; the formula counts from each one's own beginning
        idle += ranks - 1
    work = 3.0 * micro_batches * chunks
    return round(idle / (idle + work), 4)
