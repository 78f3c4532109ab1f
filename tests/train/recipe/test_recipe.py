from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.train.recipe.recipe import TrainRecipe, parse_size


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """The configuration classes that a type allows: of a union, an optional, a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        yield from sections(argument)


def settings(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """(dotted key, description) of every setting that train defines in `section` and below it."""
    for name, field in section.model_fields.items():
        owner = next(base for base in reversed(section.__mro__) if name in getattr(base, "model_fields", {}))
        if owner.__module__.startswith("penjing.train."):
            yield f"{prefix}{name}", field.description
        for inner in sections(field.annotation):
            yield from settings(inner, f"{prefix}{name}.")


def test_sizes_are_read_with_their_units() -> None:
    assert [parse_size(text) for text in ("6GiB", "1.5 KiB", "200", "3 MB")] == [6 * 2**30, 1536, 200, 3_000_000]
    with pytest.raises(ValueError, match="is no size; write for example 6GiB"):
        parse_size("6 gigs")


def test_every_setting_says_what_it_does() -> None:
    found = dict(settings(TrainRecipe))
    assert {"steps", "data.shards", "data.flip", "model.depth", "memory.recompute_rules.match"} <= found.keys()
    for key, description in found.items():
        assert description is not None, f"{key} has no description"
        assert len(description) > 10, f"{key}: {description!r} is no sentence"
        assert description.endswith("."), f"{key}: {description!r} is no sentence"


def test_a_wrong_kind_of_data_is_all_that_is_told() -> None:
    recipe = {"output": "out", "model": {"architecture": "decoder"}, "data": {"kind": "txt", "batch_size": 8}}
    with pytest.raises(ConfigError) as error:
        parse_config(TrainRecipe, recipe, "recipe.toml")
    text = r"recipe\.toml: data\.kind: 'txt' is unknown; did you mean 'text'\? Choose one of text, [-a-z, ]+"
    assert re.fullmatch(text, str(error.value))
