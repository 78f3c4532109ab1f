"""What Hugging Face's folders say of how images enter a network: `preprocessor_config.json`, since transformers 5 a
part of `processor_config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.config import parse_config
from penjing.core.errors import InputError
from penjing.core.graph.config import Filter, Pixels
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


def read_pixels(folder: Path, size: int, channels: int) -> Pixels:
    """How images enter a network of images of `size` pixels a side, by `preprocessor_config.json`.

    Raises:
        InputError: it is missing, or of a network of other images.
    """
    found = read_preprocessor(folder)
    if found is None:
        raise InputError(f"{folder} has no {PREPROCESSOR}, which says how images enter; get the model again")
    path, values = found
    if values.get("do_pad", False):
        raise InputError(f"{path}: do_pad={values['do_pad']!r} is not supported; it must be false")
    seen: dict[str, Any] = {"mean": values.get("image_mean"), "std": values.get("image_std")}
    seen |= {
        "filter": filter_of(path, values, "bicubic"),
        "height": size,
        "width": size,
        "order": "L" if channels == 1 else "RGB",
    }
    scaled = values.get("size", size)
    shortest = scaled.get("shortest_edge") if isinstance(scaled, dict) else None
    if values.get("do_center_crop", False):
        shortest = scaled if shortest is None and isinstance(scaled, int) else shortest
        cut = _sides(values.get("crop_size", size))
        if cut != (size, size) or type(shortest) is not int:
            raise InputError(
                f"{path} scales to {scaled} and cuts out {values.get('crop_size', size)}; config.json has images of "
                f"{size} x {size} pixels: the files do not belong together"
            )
        seen |= {"fit": "cover", "resize": (shortest, shortest)}
        return parse_config(Pixels, seen, str(path))
    if _sides(scaled) != (size, size):
        raise InputError(
            f"{path} scales to {scaled}; config.json has images of {size} x {size} pixels: the files do not belong "
            "together"
        )
    return parse_config(Pixels, seen, str(path))


def written_pixels(pixels: Pixels) -> dict[str, Any]:
    """What `read_pixels` reads, but for the name of the processor's class."""
    seen: dict[str, Any] = {
        "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(pixels.mean), "image_std": list(pixels.std), "resample": resample(pixels.filter),
    }  # fmt: skip
    sides = {"height": pixels.height, "width": pixels.width}
    if pixels.fit != "cover":
        return {**seen, "do_center_crop": False, "size": sides}
    short = (pixels.resize or (pixels.height, pixels.width))[0]
    return {**seen, "do_center_crop": True, "size": {"shortest_edge": short}, "crop_size": sides}


def _sides(size: Any) -> tuple[Any, Any]:
    return (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
