"""`penjing train RECIPE | simulate | plan`: flags here, the work in penjing.train, imported when it is needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penjing.core.cli_options import Force, Json, Overrides, RecipeOrCommand, refuse_early, stage_app, write_json

app = stage_app()
train_app = typer.Typer(
    cls=RecipeOrCommand,
    help="Train: `penjing train RECIPE` (short for `penjing train run RECIPE`), or plan a run on many GPUs.",
    no_args_is_help=True,
)
app.add_typer(train_app, name="train")
Recipe = Annotated[Path, typer.Argument(help="A TOML recipe, or a name of `penjing recipe list`.", show_default=False)]


@train_app.command("run")
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        str, typer.Option(help="`auto`: from the newest intact checkpoint, if any; or a checkpoint's path.")
    ] = "never",
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although settings have changed that matter to the run.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Record a few steps with torch's profiler.")] = False,
    until: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pause after this step, evaluated and saved; --resume auto goes on.", show_default=False
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the last evaluation to this file.", show_default=False)
    ] = None,
    force: Force = False,
    launch: Annotated[
        int | None,
        typer.Option(help="Processes to start on this machine, by torchrun; see [parallel].", show_default=False),
    ] = None,
) -> None:
    """Train a model as a recipe says: a checkpoint folder, and beside it FOLDER-run with metrics and training state.

    Examples:

    - `penjing train recipes/decoder-tiny.toml --set steps=200 --set precision.mode=fp32`
    - `penjing train recipes/decoder-tiny.toml --resume auto # goes on after Ctrl-C, a kill or a crash`
    - `penjing train recipes/resnet-fashion.toml --launch 2 # shares the batch between two processes`
    - `penjing train recipes/decoder-tiny.toml --set parallel.pp=2 --set parallel.zero=3 --launch 4 # shares the model`
    - `torchrun --nnodes 4 --nproc-per-node 8 … -m penjing.train recipes/decoder-tiny.toml # runs on many nodes`
    - `tensorboard --logdir build/decoder-tiny-run # shows the curves`
    """
    refuse_early(recipe, overrides, "train")
    if launch is not None:
        from penjing.train.launch.launch import launch as start

        flags = ["--resume", resume] * (resume != "never") + ["--accept-changes"] * accept_changes
        flags += ["--profile"] * profile + ["--force"] * force + ([] if until is None else ["--until", str(until)])
        flags += [] if json_file is None else ["--json", str(json_file)]
        raise typer.Exit(start(launch, recipe, overrides or [], flags))
    from penjing.core.progress import progress_bar
    from penjing.train.run import train as run

    with progress_bar() as progress:
        results = run(
            recipe, overrides or [], resume=resume, accept_changes=accept_changes, force=force, profile=profile,
            until=until, progress=progress,
        )  # fmt: skip
    if json_file is not None and os.environ.get("RANK", "0") == "0":
        write_json(results, json_file)


@train_app.command("evaluate")
def evaluate(
    recipe: Recipe,
    model: Annotated[Path, typer.Option(help="The checkpoint or artifact that answers.", show_default=False)],
    samples: Annotated[int, typer.Option(min=1, max=64, help="Answers to each prompt, beside the likeliest.")] = 8,
    overrides: Overrides = None,
    json_file: Json = None,
) -> None:
    """Answer the prompts that a recipe of rollouts holds out, and print the mean reward and the best of several tries.

    The model may be any of the recipe's tokenizer: before, after, or compressed.

    Example: `penjing train evaluate recipes/smollm2-grpo.toml --model build/smollm2-grpo --samples 16`
    """
    refuse_early(recipe, overrides, "train")
    from penjing.core.progress import print_table, progress_bar
    from penjing.train.align.evaluate import evaluate_answers

    with progress_bar() as progress:
        result = evaluate_answers(recipe, overrides, model, samples, progress)
    print_table(result)
    write_json(result, json_file)


@train_app.command("search")
def search(
    recipe: Annotated[Path, typer.Argument(help="A search recipe, or a name of one.", show_default=False)],
    overrides: Overrides = None,
    force: Force = False,
) -> None:
    """Search for settings by successive halving: many short runs of a recipe, of which the better go on.

    The same command goes on where a search was ended. FOLDER/best.toml is the recipe of the winner, whose checkpoint is
    there already, and FOLDER/report.html shows all trials.

    Examples:

    - `penjing train search recipes/decoder-tiny-search.toml`
    - `penjing train search recipes/decoder-tiny-search.toml --set trials=8 --set 'space."clip.norm"=[0.1, 10.0]'`
    """
    refuse_early(recipe, overrides, "search")
    from penjing.core.progress import progress_bar
    from penjing.train.search.search import run_search

    with progress_bar() as progress:
        run_search(recipe, overrides, force=force, progress=progress)


@train_app.command("simulate")
def simulate(
    recipe: Recipe,
    stages: Annotated[int, typer.Option(min=1, help="Ranks of the pipeline.")],
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved, zb, zbv or dualpipev.")] = "1f1b",
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Of a step; 4 for each rank by default.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Model chunks of a rank: interleaved and zb.")] = None,
    device: Annotated[str, typer.Option(help="Turns FLOPs into seconds: a100, h100, h200, b200 or l40s.")] = "h100",
    measure: Annotated[bool, typer.Option("--measure", help="Time the layers on this machine instead.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the timeline into this SVG.")] = None,
    overrides: Overrides = None,
    json_file: Json = None,
) -> None:
    """Simulate a pipeline schedule on the recipe's layers: bubble, seconds, activations; needs no GPU.

    Example: `penjing train simulate recipes/decoder-1b.toml --stages 32 --schedule interleaved --out timeline.svg`
    """
    refuse_early(recipe, overrides, "train")
    from penjing.core.progress import print_table, progress_bar
    from penjing.train.plan.simulation import simulate_recipe

    with progress_bar() as progress:
        result = simulate_recipe(
            recipe, overrides, stages=stages, schedule=schedule, micro_batches=micro_batches, chunks=chunks,
            device=device, measure=measure, out=out, progress=progress,
        )  # fmt: skip
    print_table(result)
    write_json(result, json_file)


@train_app.command("plan")
def plan(
    recipe: Recipe,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the cluster, all alike.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a GPU, for example 80GiB.")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="Pools of unlike machines as TOML, instead of --gpus and --memory.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node, joined by its fast links.")] = 8,
    device: Annotated[str, typer.Option(help="a100, h100, h200, b200 or l40s.")] = "h100",
    out: Annotated[Path | None, typer.Option("--out", help="Write the best as a recipe into this TOML.")] = None,
    kubernetes: Annotated[
        Path | None, typer.Option(help="With --cluster and --out: write a JobSet and Kueue's flavors into this JSON.")
    ] = None,
    ray: Annotated[
        Path | None, typer.Option(help="With --cluster and --out: write a placement on a Ray cluster into this JSON.")
    ] = None,
    overrides: Overrides = None,
    json_file: Json = None,
) -> None:
    """Search mesh, ZeRO, micro-batch and recomputation for a cluster by predicted time and memory; needs no GPU.

    Examples:

    - `penjing train plan recipes/decoder-1b.toml --gpus 64 --memory 80GiB --out build/decoder-1b-64.toml`
    - `penjing train plan recipes/decoder-1b.toml --cluster cluster.toml`
    """
    refuse_early(recipe, overrides, "train")
    from penjing.core.errors import ConfigError
    from penjing.train.plan.placement import Found
    from penjing.train.plan.planner import (
        as_rows,
        placement_rows,
        plan_cluster,
        plan_recipe,
        print_placements,
        print_plan,
        print_roles,
        role_rows,
    )

    if cluster is not None:
        if gpus is not None or memory is not None:
            raise ConfigError("--cluster says what machines there are; leave --gpus and --memory out")
        placed = plan_cluster(recipe, cluster, overrides, out=out, kubernetes=kubernetes, ray=ray)
        if isinstance(placed, Found):
            print_placements(placed)
            write_json(placement_rows(placed), json_file)
        elif isinstance(placed, list):
            print_roles(placed)
            write_json(role_rows(placed), json_file)
        else:
            print_plan(placed, "its memory", str(cluster))
            write_json(as_rows(placed), json_file)
        return
    if kubernetes is not None or ray is not None:
        raise ConfigError("--kubernetes and --ray write the pools of a cluster; give them by --cluster FILE")
    if gpus is None or memory is None:
        raise ConfigError("give --gpus and --memory of GPUs that are alike, or --cluster FILE of pools that are not")
    found = plan_recipe(
        recipe, overrides, gpus=gpus, memory=memory, gpus_per_node=gpus_per_node, device=device, out=out
    )
    print_plan(found, memory, device)
    write_json(as_rows(found), json_file)
    if out is not None:
        each = min(gpus, gpus_per_node)
        launch = (
            f"torchrun --nnodes {gpus // each} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        )
        typer.echo(f"next: {launch} -m penjing.train {out}", err=True)
