"""`penjing recipe list | new | keys`: the recipes that come with penjing, and what a recipe may say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from penjing.core.cli_options import Force

recipe_app = typer.Typer(help="Recipes that come with penjing, and every key that one may hold.", no_args_is_help=True)


@recipe_app.command("list")
def list_() -> None:
    """List the recipes that come with penjing: name, the stage that runs it, what it makes.

    Example: `penjing recipe list`
    """
    from penjing.core.recipes import known_recipes

    recipes = known_recipes()
    width = max(len(each.name) for each in recipes)
    stage = max(len(each.stage) for each in recipes)
    for each in recipes:
        print(f"{each.name:{width}}  {each.stage:{stage}}  {each.summary}")


@recipe_app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="A name that `penjing recipe list` shows.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The TOML file to write.", show_default=False)],
    force: Force = False,
) -> None:
    """Copy a recipe that comes with penjing into a file of your own.

    Example: `penjing recipe new smollm2-int8 my.toml`
    """
    from penjing.core.progress import typed
    from penjing.core.recipes import command_of, copy_recipe

    stage = copy_recipe(name, out, force=force)
    print(f"wrote {out}; run it with 'penjing {command_of(stage)} {typed(out)}'", file=sys.stderr)


@recipe_app.command("keys")
def keys(
    stage: Annotated[
        Literal["compress", "compress-search", "curate", "search", "train"],
        typer.Argument(help="The stage that runs the recipe."),
    ],
    section: Annotated[str | None, typer.Argument(help="Such as steps.quantize or data; all when left out.")] = None,
) -> None:
    """Show every key of a stage's recipes: type, default, meaning.

    Example: `penjing recipe keys compress steps.quantize`
    """
    from penjing.core.recipe_keys import as_text, find_sections

    print(as_text(find_sections(stage, section)), end="")
