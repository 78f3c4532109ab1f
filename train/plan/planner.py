"""`penjing train plan`: the ten best ways to run a recipe on a cluster, and the recipe with the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penjing.core.config import dump_toml, load_recipe, parse_config, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import error_console, plural
from penjing.train.numerics.recompute import Recompute
from penjing.train.parallel.config import ParallelConfig
from penjing.train.plan.cluster import Cluster, Pool, figures, joined, read_cluster
from penjing.train.plan.hardware import hardware
from penjing.train.plan.jobset import write_manifests
from penjing.train.plan.memory import Run, show_bytes
from penjing.train.plan.placement import Found, Placement, find_placements
from penjing.train.plan.preflight import check_recipe
from penjing.train.plan.ray_placement import write_placement
from penjing.train.plan.roles import Assignment, Sampling, assign_roles
from penjing.train.plan.search import Candidate, Plan, run_line, search
from penjing.train.recipe.data import RolloutData, TextData
from penjing.train.recipe.load import load_train_recipe
from penjing.train.recipe.recipe import TrainRecipe, parse_size


def plan_recipe(
    recipe_path: Path,
    overrides: list[str] | None = None,
    *,
    gpus: int,
    memory: str,
    gpus_per_node: int = 8,
    device: str = "h100",
    out: Path | None = None,
) -> Plan:
    """Search, and write the recipe of the best.

    Args:
        memory: of a GPU, such as "80GiB".
        out: a TOML file for the recipe.

    Raises:
        ConfigError: a recipe without decoder or text, a wrong size, an unknown device, or a cluster that cannot run it.
    """
    recipe, model, data = _plannable(recipe_path, overrides, out)
    if isinstance(data, RolloutData):
        raise ConfigError("a recipe of rollouts is planned for pools, which get roles: give --cluster FILE, of one too")
    try:
        limit = parse_size(memory)
    except ValueError as error:
        raise ConfigError(f"--memory {error}") from None
    found = search(
        model, hardware(device), gpus=gpus, memory=limit, gpus_per_node=min(gpus_per_node, gpus),
        batch_size=data.batch_size, length=data.sequence_length, check=_check_of(recipe, gpus),
    )  # fmt: skip
    if out is not None:
        _write_recipe(out, recipe_text(recipe_path, overrides or [], found.best[0], gpus))
    return found


def plan_cluster(
    recipe_path: Path,
    cluster_path: Path,
    overrides: list[str] | None = None,
    *,
    out: Path | None = None,
    kubernetes: Path | None = None,
    ray: Path | None = None,
) -> Plan | Found | list[Assignment]:
    """Search ways to use pools of unlike machines, and write the recipe of the best; a cluster whose pools do not
    differ is planned as `plan_recipe` does. Where answers are sampled, or a pool may prepare data, pools get roles.

    Args:
        out: a TOML file for the recipe.
        kubernetes: a JSON file for the manifests of a run of that recipe. ray: one for its placement on a Ray cluster.

    Raises:
        ConfigError: as `plan_recipe`, `write_manifests` and `write_placement`, or a cluster that `read_cluster`,
            `figures`, `find_placements` or `assign_roles` refuses.
    """
    recipe, model, data = _plannable(recipe_path, overrides, out)
    for flag, file in (("--kubernetes", kubernetes), ("--ray", ray)):
        if file is not None and out is None:
            raise ConfigError(f"{flag}: what it writes runs the planned recipe; name a file for it by --out too")
    cluster = joined(read_cluster(cluster_path))

    def write_runs(pools: list[Pool], prepare: Sequence[str] = ()) -> None:
        assert out is not None
        if kubernetes is not None:
            write_manifests(kubernetes, pools, out)
        if ray is not None:
            for line in write_placement(ray, pools, out, prepare):
                error_console().print(line, highlight=False, soft_wrap=True)

    if isinstance(data, RolloutData) or any("data" in pool.roles for pool in cluster.pools):
        assignments = _roles(model, cluster, data)
        if out is not None:
            best = next((each for each in assignments if each.runs), None)
            if best is None:
                raise ConfigError("--out: no way that penjing runs fits, for it samples where it learns; see the table")
            _write_recipe(out, _role_recipe(recipe_path, overrides or [], best, data))
            write_runs([part.pool for part in best.learner.parts], best.data)
        return assignments
    if len(cluster.pools) == 1:
        pool, device = cluster.pools[0], figures(cluster.pools[0])
        plan = search(
            model, device, gpus=pool.count, memory=device.memory, gpus_per_node=pool.node, batch_size=data.batch_size,
            length=data.sequence_length, check=_check_of(recipe, pool.count),
        )  # fmt: skip
        if out is not None:
            _write_recipe(out, recipe_text(recipe_path, overrides or [], plan.best[0], pool.count))
            write_runs([pool])
        return plan
    found = find_placements(model, cluster, batch_size=data.batch_size, length=data.sequence_length)
    if out is not None:
        best = found.placements[0]
        head = [
            run_line(best.run),
            f"predicted for {plural(best.devices, 'device')}: {best.step:.3g} s a step",
            *told(best),
        ]
        _write_recipe(out, _with_run(recipe_path, overrides or [], best.run, head, _more(best)))
        write_runs([part.pool for part in best.parts])
    return found


def _more(placement: Placement) -> dict[str, Any]:
    """Settings of [parallel] that a placement needs beside its mesh."""
    more: dict[str, Any] = {"shares": "auto"} if placement.way == "replicas" else {}
    return more | (
        {"stage_layers": [n for part in placement.parts for n in part.layers]} if placement.way == "stages" else {}
    )


def _roles(model: DecoderConfig, cluster: Cluster, data: TextData | RolloutData) -> list[Assignment]:
    if isinstance(data, TextData):
        return assign_roles(model, cluster, batch_size=data.batch_size, length=data.sequence_length)
    answers = Sampling(data.batch_size, data.samples, data.max_tokens, cluster.prompt_tokens)
    length = answers.length + answers.tokens
    return assign_roles(model, cluster, batch_size=answers.count, length=length, answers=answers)


def _role_recipe(recipe_path: Path, overrides: list[str], best: Assignment, data: TextData | RolloutData) -> str:
    run = best.learner.run
    head = [run_line(run), f"predicted: {best.step:.3g} s a step", *told(best.learner), *role_lines(best)]
    if isinstance(data, RolloutData):  # whose micro-batches are of prompts
        run = replace(run, micro_batch=run.micro_batch // data.samples)
    return _with_run(recipe_path, overrides, run, head, _more(best.learner))


def role_lines(one: Assignment) -> list[str]:
    """A line for each role beside learning: who has it, and what it takes of a step."""
    lines = []
    if one.rollout:
        who = ", ".join(f"{pool} up to {load} answers each" for pool, load in one.rollout.items())
        weights = f", and {one.seconds['weights']:.3g} s for the weights" if one.seconds["weights"] else ""
        lines.append(f"sampling: {who}: {one.seconds['sampling']:.3g} s{weights}")
    if one.data:
        lines.append(f"data: {', '.join(one.data)}: {one.seconds['data']:.3g} s beside it")
    return lines


def print_roles(found: list[Assignment]) -> None:
    """Show the ten best as a table, and whether the best is one that penjing runs."""
    from rich.table import Table

    console = error_console()
    table = Table("", "learning", "other roles", "settings")
    for header in ("learning s", "step s"):
        table.add_column(header, justify="right")
    for place, one in enumerate(found[:10], 1):
        learns = "\n".join(f"{part.pool.count} {part.pool.label}" for part in one.learner.parts)
        other = "\n".join(role_lines(one)) + ("" if one.runs else "\n(predicted alone)")
        learning = f"{one.seconds['learning']:.3g}"
        table.add_row(str(place), learns, other, run_line(one.learner.run), learning, f"{one.step:.3g}")
    console.print(table)
    runs = next((place for place, one in enumerate(found, 1) if one.runs), None)
    if runs != 1:
        best = "none of these" if runs is None else f"way {runs} ({found[runs - 1].step:.3g} s a step)"
        console.print(f"penjing samples where it learns: it runs {best}, which --out writes", highlight=False)


def role_rows(found: list[Assignment]) -> list[dict[str, Any]]:
    """The ten best as plain values, for JSON."""
    return [
        {
            "learner": [part.pool.label for part in one.learner.parts],
            "rollout": one.rollout,
            "data": list(one.data),
            "settings": run_line(one.learner.run),
            "seconds": one.seconds,
            "step_s": one.step,
            "runs": one.runs,
        }
        for one in found[:10]
    ]


def _plannable(
    recipe_path: Path, overrides: list[str] | None, out: Path | None
) -> tuple[TrainRecipe, DecoderConfig, TextData | RolloutData]:
    recipe = load_train_recipe(recipe_path, overrides)
    if not isinstance(recipe.model, DecoderConfig) or not isinstance(recipe.data, TextData | RolloutData):
        raise ConfigError(
            "planning is for decoders on text or rollouts; give a recipe with model.architecture = 'decoder'"
        )
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out}: the plan is a recipe; name a file that ends in .toml")
    return recipe, recipe.model, recipe.data


def _check_of(recipe: TrainRecipe, gpus: int) -> Callable[[ParallelConfig, Recompute], None]:
    """Refuses what the rest of `recipe` does not go with, as training would."""

    def check(parallel: ParallelConfig, recompute: Recompute) -> None:
        memory = recipe.memory.model_copy(update={"recompute": recompute})
        data = recipe.data.model_copy(update={"micro_batch": 1})
        values = recipe.model_dump() | {"parallel": parallel, "memory": memory, "data": data}
        check_recipe(parse_config(type(recipe), values, f"memory.recompute={recompute}"), gpus)

    return check


def _write_recipe(out: Path, text: str) -> None:
    atomic_write_text(out, text)
    load_recipe(TrainRecipe, out)  # what was written is a recipe


def recipe_text(recipe_path: Path, overrides: list[str], best: Candidate, gpus: int) -> str:
    """The recipe as TOML with the settings of `best`."""
    head = [
        run_line(best.run),
        f"predicted for {plural(gpus, 'GPU')}: {best.time.total:.3g} s a step, MFU {best.time.mfu:.0%}, "
        f"{best.memory.total / 2**30:.1f} GiB a rank",
    ]
    return _with_run(recipe_path, overrides, best.run, head, {})


def _with_run(recipe_path: Path, overrides: list[str], run: Run, head: list[str], more: dict[str, Any]) -> str:
    values, parallel = read_recipe(recipe_path, overrides), run.parallel
    chosen: dict[str, Any] = {"zero": parallel.zero}  # dp follows the processes, so that their number may change
    chosen |= {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep") if getattr(parallel, name) > 1}
    if parallel.shards is not None:
        chosen["shards"] = parallel.shards
    if parallel.tp > 1:
        chosen["sequence"] = parallel.sequence
    if parallel.pp > 1:
        chosen["schedule"] = parallel.schedule
    values["parallel"] = chosen | more
    values["data"]["micro_batch"] = run.micro_batch
    values.setdefault("memory", {})["recompute"] = run.recompute
    return "".join(f"# {line}\n" for line in head) + dump_toml(values)


def told(placement: Placement) -> list[str]:
    """A line for each pool of a placement: its processes, and what they do."""
    lines, first = [], 0
    for part in placement.parts:
        last = first + part.pool.count - 1
        does = f"up to {part.samples} samples each" if part.samples else "equal shares"
        if part.layers:
            does = f"{'stages' if len(part.layers) > 1 else 'a stage'} of {' + '.join(map(str, part.layers))} layers"
        span = f"process {first}" if first == last else f"processes {first} to {last}"
        lines.append(f"{span}: {part.pool.label}, {does}, {show_bytes(part.memory)}")
        first = last + 1
    return lines


def print_placements(found: Found) -> None:
    """Show the ten best as a table, and what fell out and why."""
    from rich.table import Table

    console = error_console()
    table = Table("", "pools, in the order of their processes", "settings", "what each does")
    table.add_column("step s", justify="right")
    for place, one in enumerate(found.placements[:10], 1):
        pools = " → ".join(f"{part.pool.count} {part.pool.label}" for part in one.parts)
        table.add_row(str(place), pools, run_line(one.run), "\n".join(told(one)), f"{one.step:.3g}")
    console.print(table)
    reasons = "; ".join(f"{why}: {count}" for why, count in found.rejected.most_common()) or "none"
    console.print(f"fell out: {reasons}", highlight=False)


def placement_rows(found: Found) -> list[dict[str, Any]]:
    """The ten best as plain values, for JSON."""
    return [
        {
            "way": one.way,
            "settings": run_line(one.run),
            "step_s": one.step,
            "pools": [
                {"name": part.pool.label, "devices": part.pool.count, "samples": part.samples,
                 "stage_layers": list(part.layers), "bytes": part.memory}
                for part in one.parts
            ],
        }
        for one in found.placements[:10]
    ]  # fmt: skip


def print_plan(plan: Plan, memory: str, device: str) -> None:
    """Show the ten best as a table, and what fell out and why."""
    from rich.table import Table

    console = error_console()
    table = Table("", "mesh and settings")
    for header in ("step s", "tokens/s/GPU", "MFU", "GiB a rank", "bubble", "waiting for others"):
        table.add_column(header, justify="right")
    for place, found in enumerate(plan.best, 1):
        time = found.time
        waits = time.tensor + time.context + time.expert + time.data
        table.add_row(
            str(place), run_line(found.run), f"{time.total:.3g}", f"{time.tokens_per_gpu:,.0f}", f"{time.mfu:.1%}",
            f"{found.memory.total / 2**30:.1f}", f"{time.bubble / time.total:.1%}", f"{waits / time.total:.1%}",
        )  # fmt: skip
    console.print(table)
    reasons = "; ".join(f"{why}: {count}" for why, count in plan.rejected.items()) or "none"
    console.print(
        f"{plan.considered} settings considered on {device} with {memory}; fell out: {reasons}", highlight=False
    )
    console.print(f"the best needs {plan.best[0].memory}", highlight=False)


def as_rows(plan: Plan) -> list[dict[str, Any]]:
    """The ten best as plain values, for JSON."""
    return [
        {
            "settings": run_line(found.run),
            "step_s": found.time.total,
            "tokens_per_s_per_gpu": found.time.tokens_per_gpu,
            "mfu": found.time.mfu,
            "bytes": found.memory.total,
            "bytes_by_part": dict(found.memory.__dict__),
        }
        for found in plan.best
    ]
