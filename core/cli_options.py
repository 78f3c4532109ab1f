"""What the command lines of the stages share: kinds of options, and the group whose default is a recipe."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from penjing.core.recipes import StageName

Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value of the recipe.")
]


def _refuse_unwritable(file: Path | None) -> Path | None:
    """`file` if it may be written: the result that it is for can take minutes."""
    from penjing.core.errors import InputError
    from penjing.core.files import check_writable

    if file is not None:
        check_writable(file)
        if file.is_dir():
            raise InputError(f"--json {file}: it is a folder; give the name of the file to write")
    return file


Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file.", callback=_refuse_unwritable)
]


def model_folder(help_: str) -> Any:
    """The argument of a command that is a model's folder. One that is missing is told before anything else, and so
    before the command imports what takes seconds."""
    return typer.Argument(help=help_, show_default=False, callback=_refuse_missing)


def _refuse_missing(folder: Path | None) -> Path | None:
    from penjing.core.family import check_folder

    if folder is not None:
        check_folder(folder)
    return folder


def refuse_early(path: Path, overrides: list[str] | None, stage: StageName, older: Collection[str] = ()) -> None:
    """What is wrong with a recipe's name, form, stage or keys, or the folder of its model, before a command imports
    what takes seconds. A pipe, which can be read once, and `older` keys are left to the command.

    Raises:
        ConfigError: see `read_recipe`, `check_stage` and `check_keys`.
        InputError: there is no such folder.
    """
    from penjing.core.config import read_recipe
    from penjing.core.errors import InputError
    from penjing.core.family import check_folder, from_elsewhere
    from penjing.core.recipes import check_keys, check_stage

    if path.exists() and not path.is_file() and not path.is_dir():
        return
    values = read_recipe(path, overrides)
    check_stage(values, str(path), stage)
    if not from_elsewhere():
        check_keys(values, str(path), stage, older)
    key = "initial" if stage == "train" else "model"
    if isinstance(model := values.get(key), str):
        try:
            check_folder(Path(model))
        except InputError as error:
            raise InputError(f"{key} = {error}") from None


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
