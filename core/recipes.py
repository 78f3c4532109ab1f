"""The recipes that come with penjing, found by name wherever the package lies, and which stage a recipe is for."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text

StageName = Literal["train", "search", "compress", "compress-search", "curate"]
PACKAGE = "penjing.recipes"
SUFFIX = ".toml"
# Of a search over compression; one over training names settings with dots.
CHOICES = {"widths", "bits", "layers", "windows"}
_SEARCHES = {"search": "train search", "compress-search": "compress search"}


@dataclass(frozen=True)
class KnownRecipe:
    """A recipe that comes with penjing, and the first sentence of what it says about itself."""

    name: str
    stage: StageName
    summary: str


def known_recipes() -> list[KnownRecipe]:
    """Every recipe that comes with penjing, in the order of the names."""
    texts = {name: named_recipe(name) for name in recipe_names()}
    return [KnownRecipe(name, stage_of(tomllib.loads(text), name), summary(text)) for name, text in texts.items()]


def recipe_names() -> list[str]:
    """Names of the recipes that come with penjing, such as "smollm2-int8"."""
    from importlib.resources import files

    names = [entry.name for entry in files(PACKAGE).iterdir()]
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def named_recipe(name: str) -> str:
    """The TOML text of the recipe `name`, which may also be called as in a checkout: "recipes/NAME.toml".

    Raises:
        ConfigError: there is none of this name; near ones are listed.
    """
    from importlib.resources import files

    names = recipe_names()
    in_checkout = Path(name)
    if in_checkout.parent == Path("recipes") and in_checkout.suffix == SUFFIX and in_checkout.stem in names:
        name = in_checkout.stem
    if name not in names:
        near = difflib.get_close_matches(Path(name).name.removesuffix(SUFFIX), names, n=3)
        meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ConfigError(
            f"recipe {name} does not exist; {meant}'penjing recipe list' shows those that come with penjing"
        )
    return (files(PACKAGE) / f"{name}{SUFFIX}").read_text(encoding="utf-8")


def stage_of(values: dict[str, Any], source: str) -> StageName:
    """The stage that runs the recipe with these `values`.

    A training recipe describes its model in a table or begins with a checkpoint, `initial`; a compression recipe names
    the folder of one; a recipe of a corpus has none, and sources; one of a search names the recipe that it varies,
    in widths and bits if that is one of compression.

    Raises:
        ConfigError: it does neither; `source` names the recipe.
    """
    model = values.get("model")
    if isinstance(model, dict) or "initial" in values:
        return "train"
    if isinstance(model, str):
        return "compress"
    if "sources" in values:
        return "curate"
    if isinstance(space := values.get("space"), dict):
        return "compress-search" if space and not space.keys() - CHOICES else "search"
    if "base" in values and "cost" in values:  # with the whole of the default space
        return "compress-search"
    raise ConfigError(
        f"{source} names no model: a training recipe describes one in [model] or names one by initial, a compression "
        'recipe has model = "FOLDER"'
    )


def check_stage(values: dict[str, Any], source: str, stage: StageName) -> None:
    """Refuse the recipe of another stage, by the name of the command that runs it.

    Raises:
        ConfigError: `values` are such a recipe; `source` names it.
    """
    try:
        found = stage_of(values, source)
    except ConfigError:
        return  # what is missing is told when the recipe is read
    if found != stage:
        raise ConfigError(
            f"{source} is a recipe of 'penjing {command_of(found)}', not of 'penjing {command_of(stage)}'"
        )


def check_keys(values: dict[str, Any], source: str, stage: StageName, older: Collection[str] = ()) -> None:
    """Refuse keys that no recipe of a stage has, by the list of names that is kept beside this file: the settings
    themselves take seconds to import. What only some forms of a section have is left to them, and so are `older` keys.

    Raises:
        ConfigError: there is such a key; `source` names the recipe.
    """
    text = (Path(__file__).parent / "recipe_names.json").read_text(encoding="utf-8")
    sections: list[tuple[str, str, str, list[str]]] = json.loads(text)[stage]

    def forms(owner: str, entry: dict[str, Any]) -> list[tuple[str, list[str]]]:
        return [
            (name, keys)
            for name, teller, value, keys in sections
            if (name == owner and not teller)
            or (teller and name.startswith(f"{owner}.") and entry.get(teller) == value)
        ]

    def walk(entry: dict[str, Any], found: list[tuple[str, list[str]]], where: str) -> None:
        valid = sorted({key for _, keys in found for key in keys})
        for key, value in entry.items() if found else ():
            if key not in valid and key not in older:
                near = difflib.get_close_matches(key, valid, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ConfigError(f"{source}: unknown key {where + key!r}{hint} Valid keys: {', '.join(valid)}")
            many = isinstance(value, list)
            for place, each in enumerate(value if many else [value]):
                if isinstance(each, dict):
                    owners = [f"{name}.{key}" if name else key for name, _ in found]
                    inside = [form for owner in owners for form in forms(owner, each)]
                    walk(each, inside, f"{where}{key}.{place}." if many else f"{where}{key}.")

    walk(values, forms("", values), "")


def command_of(stage: StageName) -> str:
    """The command that runs the recipes of a stage, such as "train search"."""
    return _SEARCHES.get(stage, stage)


def summary(text: str) -> str:
    """The first sentence of the comment that a recipe begins with, without the command that runs it."""
    said = []
    for line in text.splitlines():
        if not re.match(r"# \S", line):
            break
        said.append(line[2:])
    sentence = re.split(r"(?<=\.)\s", " ".join(said), maxsplit=1)[0]
    return re.sub(r":? `penjing [^`]*`", "", sentence)


def copy_recipe(name: str, out: Path, *, force: bool = False) -> StageName:
    """Write the recipe `name` to the file `out`, to be changed there; the stage that runs it.

    Raises:
        ConfigError: there is no recipe of this name.
        InputError: `out` exists, and `force` is False.
        SetupError: it cannot be written.
    """
    text = named_recipe(name)
    if out.exists() and not force:
        raise InputError(f"{out} already exists; replace it with --force, or choose another file")
    atomic_write_text(out, text)
    return stage_of(tomllib.loads(text), name)
