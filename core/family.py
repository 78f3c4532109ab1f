"""Which family of networks a folder holds: its `config.json` is asked here, and nowhere else.

A family is a kind of network that every stage knows how to handle. What a stage can do with one is a frozen table,
`FAMILY` of `penjing.STAGE.families.NAME`. A package outside penjing adds a family by an entry point of the group
"penjing.families" (NAME = "its_package") with a module for each stage, such as `its_package.compress`; a folder says
that it belongs to it by `"penjing_family": NAME` in `config.json`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError, first_line
from penjing.core.manifest import read_json_object
from penjing.core.packages import FOLDERS
from penjing.core.recipes import command_of, known_recipes

FamilyName = str
FAMILIES: dict[FamilyName, str] = {
    "decoder": "a decoder",
    "classifier": "an image classifier",
    "encoder": "a text encoder",
    "graph": "a graph",
    "towers": "two towers",
    "vision_language": "a decoder that sees",
}
"""The families of penjing itself, and what messages call one of their networks."""
GROUP, KEY = "penjing.families", "penjing_family"
OWN_SEEING = "penjing_sight"  # `model_type` of decoders that see, of a shape that no folder of Hugging Face holds
SEEING = ("idefics3", "smolvlm", "llava", OWN_SEEING)  # two of them name one network
PAIRED = ("clip", "siglip")  # `model_type` of two towers
EYES = "sight"  # folder of an artifact with what a decoder sees with
BERT = "bert"  # `model_type` of the text encoders that penjing knows


def family_of(folder: Path) -> FamilyName:
    """The family of the checkpoint or artifact in `folder`; nothing else of it is checked.

    Raises:
        InputError: there is no readable `config.json`, or it says nothing of any known family.
    """
    check_folder(folder)
    path = folder / "config.json"
    values = read_json_object(path)
    if KEY in values:
        name = values[KEY]
        if isinstance(name, str) and (name in FAMILIES or name in _packages()):
            return name
        known = ", ".join([*FAMILIES, *_packages()])
        raise InputError(f"{path}: {KEY} = {name!r} is not installed; the known families are {known}")
    if "task" in values:
        return "classifier"
    if values.get("model_type") in SEEING:
        return "vision_language"
    if values.get("model_type") in PAIRED:
        return "towers"
    if values.get("model_type") == BERT:
        return "encoder"
    if "model_type" in values or "architectures" in values:
        return "decoder"
    raise InputError(
        f"{path} names no family of networks: a decoder has model_type, a text encoder model_type {BERT!r}, an image "
        "classifier task; get the folder again, or import the model with 'penjing import'"
    )


def check_folder(folder: Path) -> None:
    """Refuse what is no folder; quickly, so that commands can ask before they import what takes seconds.

    Raises:
        InputError: there is nothing, or a file.
    """
    if not folder.exists():
        raise InputError(f"{folder} does not exist; {_how_made(folder)}")
    if not folder.is_dir():
        source = f"{folder}:FUNCTION" if folder.suffix == ".py" else str(folder)
        raise InputError(
            f"{folder} is a file, not a model folder; 'penjing import {source} FOLDER' makes one of .gguf, .onnx, .py"
        )


def _how_made(folder: Path) -> str:
    """The command that makes a folder which documents and recipes speak of; of any other, what makes such folders."""
    if folder.parent == Path("build"):  # where recipes write
        if folder.name in FOLDERS:
            return f"'penjing import {FOLDERS[folder.name]} {folder}' makes it"
        for recipe in known_recipes():
            if recipe.name == folder.name:
                return f"'penjing {command_of(recipe.stage)} {recipe.name}' makes it"
    return "check the path: 'penjing import', 'penjing train' and 'penjing compress' make such folders"


def sees(folder: Path) -> bool:
    """Whether the checkpoint or artifact in `folder` is a decoder that takes images.

    Raises:
        InputError: see `family_of`.
    """
    return (folder / EYES).is_dir() or family_of(folder) == "vision_language"


def table_of(stage: str, name: FamilyName) -> Any:
    """What `stage` ("train", "compress", "serve") can do with the family `name`: its module's `FAMILY`.

    Raises:
        InputError: the family has nothing for this stage, or the package that brings it cannot be imported.
    """
    module = f"penjing.{stage}.families.{name}" if name in FAMILIES else f"{_packages()[name]}.{stage}"
    try:
        found = import_module(module)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{module}.".startswith(f"{absent}."):
            why = f"networks of the family {name!r} have no part in {stage}: there is no {module}"
            raise InputError(why) from None
        if name in FAMILIES:
            raise
        raise InputError(
            f"the family {name!r} is brought by another package, whose module {module} cannot be imported "
            f"({type(error).__name__}: {first_line(error)}); mend that package, or remove it"
        ) from error
    if not hasattr(found, "FAMILY"):
        raise InputError(f"{module}, which brings the family {name!r}, has no FAMILY, the table of what {stage} can do")
    return found.FAMILY


def names_of(stage: str) -> list[FamilyName]:
    """Every family that has a table for `stage`."""
    found = []
    for name in [*FAMILIES, *_packages()]:
        try:
            table_of(stage, name)
        except InputError:
            continue
        found.append(name)
    return found


def from_elsewhere() -> bool:
    """Whether packages besides penjing bring families, and so settings of their own."""
    return bool(_packages())


@cache
def _packages() -> dict[FamilyName, str]:
    return {entry.name: entry.value for entry in entry_points(group=GROUP) if entry.name not in FAMILIES}
