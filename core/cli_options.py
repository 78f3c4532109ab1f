"""What the command lines of the stages share: kinds of options, and the group whose default is a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value of the recipe.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")]


def stage_app() -> typer.Typer:
    """What a stage's commands are added to; `penjing` shows them among its own."""
    return typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False)


class RecipeOrCommand(TyperGroup):
    """`penjing compress RECIPE` beside `penjing compress inspect …`: what is no command goes to `run`.

    A misspelt command is no recipe: the error names the one that was meant.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in ctx.help_option_names and not self._is_meant(args[0]):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def _is_meant(self, name: str) -> bool:
        from difflib import get_close_matches

        return name in self.commands or (
            bool(get_close_matches(name, self.commands, cutoff=0.85)) and not Path(name).exists()
        )


def write_json(result: Any, json_file: Path | None) -> None:
    """Write `result` to the file, or print it where standard output is no terminal."""
    import json

    from penjing.core.files import atomic_write_text

    text = json.dumps(result, indent=2)
    if json_file is not None:
        atomic_write_text(json_file, text + "\n")
    elif not sys.stdout.isatty():
        print(text)
