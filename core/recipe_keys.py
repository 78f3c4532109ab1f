"""Every key of a recipe, with its type, default and meaning, read from the settings' own descriptions.

    python -m penjing.core.recipe_keys > docs/recipes.md
    python -m penjing.core.recipe_keys names > core/recipe_names.json

`penjing recipe keys` shows the same. Where a section has several forms, told apart by one of its keys, each form is a
section of its own: "steps.quantize" is `[[steps]]` with kind = "quantize", "data.text" is `[data]` with kind = "text".
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penjing.core.config import inline_toml
from penjing.core.errors import ConfigError
from penjing.core.family import FAMILIES
from penjing.core.recipes import StageName

RECIPES: dict[StageName, str] = {
    "compress": "penjing.compress.recipe:Recipe",
    "train": "penjing.train.recipe.recipe:TrainRecipe",
    "search": "penjing.train.search.recipe:SearchRecipe",
    "compress-search": "penjing.compress.search.recipe:JointRecipe",
    "curate": "penjing.curate.recipe:CurateRecipe",
}
FORMS: dict[StageName, dict[str, str]] = {"compress": {"steps": "penjing.compress.steps.registry:step_forms"}}
"""Lists whose entries are told apart by a registry: key → a function that gives every form by its dotted name, the
first part of which is the entry's `kind`, such as "prune" or "quantize.decoder"."""
REQUIRED, LEFT_OUT = "required", "left out"
WIDTH = 100  # of a terminal
_PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", Any: "any value"}
_LIMITS = {
    "gt": "above {}",
    "ge": "at least {}",
    "lt": "below {}",
    "le": "at most {}",
    "multiple_of": "a multiple of {}",
    "min_length": "of length {} or more",
    "max_length": "of length {} or less",
}


@dataclass(frozen=True)
class Key:
    """One key of a section as a user writes it; `default` is TOML, "required" or "left out"."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A table of a recipe: what `penjing recipe keys` calls it, how TOML does, what it is for, and its keys.

    Attributes:
        name: such as "steps.prune"; "" is the part of the file before all tables.
        table: such as "[[steps]]"; "" likewise.
        told: what tells it from other forms of that table, such as 'kind = "prune"'; "" where there is one form.
        others: keys that are taken or refused by a validator, see `Config.OTHERS`.
        free: it stands in the table under names that the user chooses.
    """

    name: str
    table: str
    told: str
    about: str
    keys: tuple[Key, ...]
    others: tuple[str, ...] = ()
    free: bool = False

    @property
    def heading(self) -> str:
        """How a terminal shows it."""
        return " with ".join(part for part in (self.table, self.told) if part) or "before all sections"


def recipe_sections(stage: StageName) -> list[Section]:
    """All sections of a stage's recipes, each followed by those inside it."""
    recipe = _Recipe({key: _named(place)() for key, place in FORMS.get(stage, {}).items()})
    return list(recipe.walk(_named(RECIPES[stage])))


def find_sections(stage: StageName, wanted: str | None) -> list[Section]:
    """The section `wanted` with those inside it; all of them for None.

    Raises:
        ConfigError: there is no such section; lists the valid ones.
    """
    sections = recipe_sections(stage)
    if wanted is None:
        return sections
    name = wanted.strip("[]")
    found = [each for each in sections if each.name == name or each.name.startswith(f"{name}.")]
    if not found:
        names = [each.name for each in sections if each.name]
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"recipes of {stage} have no section {wanted!r}{meant} Their sections are {', '.join(names)}")
    return found


def as_text(sections: list[Section]) -> str:
    """The sections for a terminal, in lines of at most `WIDTH` characters where words allow it."""

    def filled(text: str, indent: str) -> list[str]:
        return [fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent) for line in text.splitlines()]

    lines = []
    for section in sections:
        lines += [section.heading, *filled(section.about, "  "), ""]
        for key in section.keys:
            lines.append(f"  {key.name}: {key.type.replace('`', '')} ({_default_text(key)})")
            lines += filled(key.meaning, "      ")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_markdown(sections: list[Section], seen: dict[tuple[Key, ...], str]) -> str:
    """The sections for a page; `seen`, which is added to, says where the page has the same keys already."""
    same = {each.name: seen.setdefault(each.keys, each.name) for each in sections}
    lines = []
    for section in sections:
        known = same[section.name]
        if known != section.name and not section.told:
            continue  # the row of the key that it stands under says where to look
        lines += [f"### {f'`{section.name}`' if section.name else 'Before all sections'}", ""]
        if section.table not in ("", f"[{section.name}]"):
            told, comma, family = section.told.partition(", ")
            lines += [f"Written as `{section.table}`{f' with `{told}`' if told else ''}{comma}{family}.", ""]
        if section.about:
            lines += [section.about, ""]
        if known != section.name:
            lines += [f"Its keys are those of `{known}`.", ""]
            continue
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in section.keys:
            inside = _joined(section.name, key.name)
            kind = key.type if same.get(inside, inside) == inside else f"{key.type}, as `{same[inside]}`"
            default = key.default if key.default in (REQUIRED, LEFT_OUT, "") else f"`{key.default}`"
            cells = [f"`{key.name}`", kind, default, " ".join(key.meaning.split())]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def page() -> str:
    """The whole of docs/recipes.md."""
    head = (
        "# The keys of recipes\n\n"
        "Every key that a recipe may hold, with its type, its default and its meaning. This page is generated from the "
        "settings themselves by `make recipes-doc`; `penjing recipe keys compress steps.prune` shows one section in a "
        "terminal. An unknown key in a recipe is an error that lists the valid ones.\n\n"
        "`--set section.key=value` changes one value for one run; steps count from 0, as in `--set steps.0.ratio=0.2`. "
        'A default of "left out" means that the key has no value unless it is written.\n'
    )
    titles: dict[StageName, str] = {
        "train": "Recipes of `penjing train`",
        "compress": "Recipes of `penjing compress`",
        "search": "Recipes of `penjing train search`",
        "compress-search": "Recipes of `penjing compress search`",
        "curate": "Recipes of `penjing curate`",
    }
    parts, seen = [head], {}
    for stage, title in titles.items():
        parts.append(f"## {title}\n\n{as_markdown(recipe_sections(stage), seen)}")
    return "\n".join(parts).rstrip() + "\n"


def names_file() -> str:
    """The whole of core/recipe_names.json: of each stage a line a section, with its name, the key and the value that
    tell it from other forms, and its keys."""
    stages = []
    for stage in RECIPES:
        lines = []
        for section in [each for each in recipe_sections(stage) if not each.free]:
            teller, _, value = section.told.partition(", of ")[0].partition(" = ")
            names = [
                section.name,
                teller,
                value.strip('"'),
                list(dict.fromkeys([*(key.name for key in section.keys), *section.others])),
            ]
            lines.append(f"    {json.dumps(names)}")
        stages.append(f"  {json.dumps(stage)}: [\n" + ",\n".join(lines) + "\n  ]")
    return "{\n" + ",\n".join(stages) + "\n}\n"


@dataclass(frozen=True)
class _Recipe:
    """A walk over a recipe's classes; `forms` are those of lists whose entries a registry tells apart."""

    forms: dict[str, dict[str, type[BaseModel]]]

    def walk(
        self, kind: type[BaseModel], name: str = "", table: str = "", told: str = "", values: BaseModel | None = None
    ) -> Iterator[Section]:
        """The section of `kind` and those inside it.

        Args:
            name, table, told: see `Section`.
            values: its defaults, where they are not those of the class.
        """
        keys, inside = [], []
        for key, field in kind.model_fields.items():
            default = getattr(values, key) if values is not None else _default(field)
            shown = "" if isinstance(default, BaseModel) else _toml(default)
            keys.append(Key(key, type_text(field.annotation, field.metadata), shown, _meaning(field)))
            free = get_origin(field.annotation) is dict
            sections = self.inside(field, _joined(name, key), _joined(table.strip("[]"), key), default)
            inside += [replace(section, free=section.free or free) for section in sections]
        yield Section(name, table, told, _about(kind), tuple(keys), getattr(kind, "OTHERS", ()))
        yield from inside

    def inside(self, field: FieldInfo, name: str, place: str, default: Any) -> Iterator[Section]:
        """The sections that a key may hold; `place`: its path in TOML."""
        table = f"[[{place}]]" if _is_list(field.annotation) else f"[{place}]"
        if name in self.forms:
            for form, kind in self.forms[name].items():
                yield from self.walk(kind, _joined(name, form), table, _told(form))
            return
        for kind, teller in _forms(field.annotation, field.discriminator):
            values = default if type(default) is kind else None
            if not isinstance(teller, str):
                yield from self.walk(kind, name, table, "", values)
                continue
            for value in get_args(kind.model_fields[teller].annotation):
                told = f"{teller} = {inline_toml(value)}"
                yield from self.walk(kind, _joined(name, value), table, told, values)


def _named(place: str) -> Any:
    """What "module:name" stands for; the stages are imported when they are asked."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _told(form: str) -> str:
    kind, _, family = form.partition(".")
    return f"kind = {inline_toml(kind)}" + (f", of {FAMILIES.get(family, family)}" if family else "")


def _joined(owner: str, key: str) -> str:
    return f"{owner}.{key}" if owner else key


def type_text(annotation: Any, limits: Any = ()) -> str:
    """A type as a reader of TOML knows it, with its limits: "integer, at least 1"."""
    found = {name: getattr(limit, name) for limit in limits for name in _LIMITS if hasattr(limit, name)}
    said = [_LIMITS[name].format(inline_toml(value)) for name, value in found.items() if value is not None]
    return ", ".join([_type(annotation), *said])


def _type(annotation: Any) -> str:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin is Literal:
        values = [f"`{inline_toml(value)}`" for value in arguments]
        return f"one of {', '.join(values)}" if len(values) > 2 else " or ".join(values)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments if each is not NoneType))
    if origin in (tuple, list):
        if origin is list or arguments[-1] is Ellipsis:
            return f"list of {_plural(_type(arguments[0]))}"
        if len(set(arguments)) == 1:
            return f"list of {len(arguments)} {_plural(_type(arguments[0]))}"
        return f"list of {', '.join(map(_type, arguments))}"
    if origin is dict:
        return f"table of {_plural(_type(arguments[1]))}"
    return "section" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation)


def _plural(kind: str) -> str:
    return f"{kind}s" if kind in ("integer", "number", "text", "path", "section") else kind


def _forms(annotation: Any, teller: Any = None) -> Iterator[tuple[type[BaseModel], Any]]:
    """The configuration classes that an annotation allows, each with the key that tells it from the others, if any."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, teller
        return
    for argument in get_args(annotation):
        if isinstance(argument, FieldInfo):
            continue
        told = [each.discriminator for each in get_args(annotation) if isinstance(each, FieldInfo)]
        yield from _forms(argument, *(told or [teller]))


def _is_list(annotation: Any) -> bool:
    if get_origin(annotation) in (tuple, list):
        return True
    return any(_is_list(argument) for argument in get_args(annotation))


def _default(field: FieldInfo) -> Any:
    return _Required if field.is_required() else field.get_default(call_default_factory=True)


class _Required:
    """Stands for the default of a key that has none."""


def _toml(value: Any) -> str:
    if value is _Required:
        return REQUIRED
    return LEFT_OUT if value is None else inline_toml(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _meaning(field: FieldInfo) -> str:
    return inspect.cleandoc(field.description or "")


def _about(kind: type[BaseModel]) -> str:
    """The docstring of the class itself, a line a paragraph, without the list of its attributes."""
    text = inspect.cleandoc(kind.__doc__ or "").split("\nAttributes:")[0].strip()
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _default_text(key: Key) -> str:
    return (
        key.default if key.default in (REQUIRED, LEFT_OUT) else f"default {key.default}" if key.default else "section"
    )


if __name__ == "__main__":
    print(names_file() if sys.argv[1:] == ["names"] else page(), end="")
