"""`penjing train RECIPE | simulate | plan`: flags here, the work in penjing.train, imported when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penjing.core.cli_shared import Force, Overrides, RecipeOrCommand

train_app = typer.Typer(
    cls=RecipeOrCommand,
    help="Train: `penjing train RECIPE` (short for `penjing train run RECIPE`), or plan a run on many GPUs.",
    no_args_is_help=True,
)
Recipe = Annotated[Path, typer.Argument(help="A TOML recipe; see `recipes/`.", show_default=False)]


@train_app.command("run")
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        str, typer.Option(help="`auto`: from the newest intact checkpoint, if any; or a checkpoint's path.")
    ] = "never",
    profile: Annotated[bool, typer.Option("--profile", help="Record a few steps with torch's profiler.")] = False,
    force: Force = False,
) -> None:
    """Train a model as a recipe says: a checkpoint folder, and beside it FOLDER-run with metrics and training state.

    Examples:

    - `penjing train recipes/decoder-tiny.toml --set steps=200 --set precision.mode=fp32`
    - `penjing train recipes/decoder-tiny.toml --resume auto` goes on after Ctrl-C, a kill or a crash
    - `torchrun --nproc-per-node 2 -m penjing.train recipes/resnet-fashion.toml` shares the batch between two processes
    - `tensorboard --logdir build/decoder-tiny-run` shows the curves
    """
    from penjing.core.progress import progress_bar
    from penjing.train.run import train as run

    with progress_bar() as progress:
        run(recipe, overrides or [], resume=resume, force=force, profile=profile, progress=progress)
