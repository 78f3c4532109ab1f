"""What Hugging Face's folders say of how images enter a network: `preprocessor_config.json`, since transformers 5 a
part of `processor_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.errors import InputError
from penjing.core.graph.config import Filter
from penjing.core.manifest import read_json_object

PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_FILTERS: dict[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def read_preprocessor(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The file and what it says; None where there is none.

    Raises:
        InputError: damaged, or with another scale of pixels than from 0 to 1.
    """
    path = folder / PREPROCESSOR
    if path.exists():
        values = read_json_object(path)
    elif (path := folder / _PROCESSOR).exists():
        values = read_json_object(path).get("image_processor")
        if not isinstance(values, dict):
            raise InputError(f"{path} has no image_processor, which says how images enter; get the model again")
    else:
        return None
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(name, True) is not True:
            raise InputError(f"{path}: {name}={values[name]!r} is not supported; it must be true")
    factor = values.get("rescale_factor", 1 / 255)
    if not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-3:
        raise InputError(f"{path}: rescale_factor={factor!r} is not supported; it must be 1 / 255")
    return path, values


def filter_of(path: Path, values: dict[str, Any], default: Filter) -> Filter:
    """How images are scaled; `default` where the file says nothing.

    Raises:
        InputError: by a filter that is not supported.
    """
    number = values.get("resample", resample(default))
    if type(number) is not int or number not in _FILTERS:
        known = ", ".join(f"{key} ({name})" for key, name in _FILTERS.items())
        raise InputError(f"{path}: resample={number!r:.40} is not supported; it must be one of {known}")
    return _FILTERS[number]


def resample(name: Filter) -> int:
    """Pillow's number of a filter."""
    return next(number for number, each in _FILTERS.items() if each == name)
