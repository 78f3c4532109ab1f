"""`penjing train plan`: the ten best ways to run a recipe on a cluster, and the recipe with the best of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from penjing.core.config import dump_toml, load_recipe, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import error_console
from penjing.train.plan.hardware import hardware
from penjing.train.plan.search import Candidate, Plan, run_line, search
from penjing.train.recipe.data import TextData
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
    recipe = load_train_recipe(recipe_path, overrides)
    if not isinstance(recipe.model, DecoderConfig) or not isinstance(recipe.data, TextData):
        raise ConfigError("planning is for decoders on text; give a recipe with model.architecture = 'decoder'")
    if out is not None and out.suffix != ".toml":
        raise ConfigError(f"--out {out}: the plan is a recipe; name a file that ends in .toml")
    try:
        limit = parse_size(memory)
    except ValueError as error:
        raise ConfigError(f"--memory {error}") from None
    found = search(
        recipe.model, hardware(device), gpus=gpus, memory=limit, gpus_per_node=min(gpus_per_node, gpus),
        batch_size=recipe.data.batch_size, length=recipe.data.sequence_length,
    )  # fmt: skip
    if out is not None:
        atomic_write_text(out, recipe_text(recipe_path, overrides or [], found.best[0], gpus))
        load_recipe(TrainRecipe, out)  # what was written is a recipe
    return found


def recipe_text(recipe_path: Path, overrides: list[str], best: Candidate, gpus: int) -> str:
    """The recipe as TOML with the settings of `best`."""
    values = read_recipe(recipe_path, overrides)
    run, parallel = best.run, best.run.parallel
    chosen: dict[str, Any] = {"zero": parallel.zero}  # dp follows the processes, so that their number may change
    chosen |= {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep") if getattr(parallel, name) > 1}
    if parallel.shards is not None:
        chosen["shards"] = parallel.shards
    if parallel.tp > 1:
        chosen["sequence"] = parallel.sequence
    if parallel.pp > 1:
        chosen["schedule"] = parallel.schedule
    values["parallel"] = chosen
    values["data"]["micro_batch"] = run.micro_batch
    values.setdefault("memory", {})["recompute"] = run.recompute
    head = (
        f"# {run_line(run)}\n# predicted for {gpus} GPUs: {best.time.total:.3g} s a step, MFU {best.time.mfu:.0%}, "
        f"{best.memory.total / 2**30:.1f} GiB a rank\n"
    )
    return head + dump_toml(values)


def print_plan(plan: Plan, memory: str, device: str) -> None:
    """Show the ten best as a table, and what fell out and why."""
    from rich.table import Table

    console = error_console(width=None if sys.stderr.isatty() else 150)
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
