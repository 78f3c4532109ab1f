"""What programs give: paths and sections of a recipe, and what is said of others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penjing.core.errors import ConfigError

StrPath = str | os.PathLike[str]
Sections = Mapping[str, Mapping[str, Any]]


def as_path(name: str, value: Any) -> Path:
    """`value`, the argument `name`, as a path.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str):
        return Path(path)
    raise ConfigError(f"{name} is {_said(value)}, which is no path; give text or a pathlib.Path")


def as_sections(sections: Any) -> dict[str, dict[str, Any]]:
    """Further sections of a recipe; none for None.

    Raises:
        ConfigError: they are no dictionaries by name.
    """
    found = {} if sections is None else sections
    if not isinstance(found, Mapping):
        raise ConfigError(f"sections is {_said(found)}; give a dictionary of dictionaries, such as {_EXAMPLE}")
    for name, section in found.items():
        if not isinstance(section, Mapping):
            raise ConfigError(f"sections[{name!r}] is {_said(section)}; give a dictionary, as in {_EXAMPLE}")
    return {name: dict(section) for name, section in found.items()}


_EXAMPLE = '{"evaluate": {"prose_tokens": 4096}}'


def _said(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})" if value is not None else "None"
