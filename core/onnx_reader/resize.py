"""Resize and Upsample of ONNX.

What torch's own interpolation computes the same way is left to it. Everything else (other rules for coordinates and
rounding, antialiasing) is linear along each axis, so it is a matrix for each axis, made once from the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from penjing.core.onnx_reader.host import as_meant
from penjing.core.onnx_reader.values import Call, Size

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _resize(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.attribute("mode", "nearest")
    rule = call.attribute("coordinate_transformation_mode", "half_pixel" if call.version >= 11 else "asymmetric")
    rounding = call.attribute("nearest_mode", "round_prefer_floor" if call.version >= 11 else "floor")
    scales, sizes = _wanted(call, x)
    axes = [axis for axis in range(x.ndim) if not _same(x, axis, scales, sizes)]
    if not axes:
        return x
    if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch" or rule == "tf_crop_and_resize":
        raise call.refused("keeps the ratio of sides or crops, which penjing does not compute")
    plain = not call.attribute("antialias", 0) and not call.attribute("exclude_outside", 0)
    name = _name_in_torch(call, x, mode, rule, rounding, scales, sizes) if plain and min(axes) >= 2 else None
    if name is not None:
        aligned = None if name.startswith("nearest") else rule == "align_corners"
        if sizes is not None:
            return F.interpolate(x, size=sizes[2:], mode=name, align_corners=aligned)
        assert scales is not None
        after = [_after(before, scale) for before, scale in zip(x.shape[2:], scales[2:], strict=True)]
        if all(_is_after(*each) for each in zip(x.shape[2:], scales[2:], after, strict=True)):
            return F.interpolate(x, scale_factor=scales[2:], mode=name, align_corners=aligned)
        kind = f"_upsample_nearest_exact{len(after)}d" if name == "nearest-exact" else f"upsample_{name}{len(after)}d"
        operator = getattr(torch.ops.aten, kind).default
        return operator(x, after, *([] if aligned is None else [aligned]), *scales[2:])
    for axis in axes:
        before = x.shape[axis]
        after = sizes[axis] if sizes is not None else _after(before, scales[axis])  # type: ignore[index]
        if not isinstance(before, int) or not isinstance(after, int):
            raise call.refused(f"({mode}, {rule}, {rounding}) needs sizes that are fixed")
        scale = after / before if sizes is not None else scales[axis]  # type: ignore[index]
        rows = call.made(
            f"rows_{axis}_{before}_{after}",
            partial(_matrix, call, mode, rule, rounding, before, after, scale),
        )
        x = torch.matmul(x.movedim(axis, -1), rows.to(x.dtype).t()).movedim(-1, axis)
    return x


def _wanted(call: Call, x: Tensor) -> tuple[list[float] | None, list[Size] | None]:
    """Scales or sizes of all axes."""
    last = 3 if call.version >= 11 else -1
    scales = call.attribute("scales")
    axes = call.attribute("axes", list(range(x.ndim)))
    if last > 0 and call.has(last):
        sizes = list(x.shape)
        for axis, size in zip(axes, call.sizes(last, "sizes"), strict=True):
            sizes[axis] = size
        return None, sizes
    if scales is None:
        scales = call.sizes(2 if call.version >= 11 else 1, "scales")
    whole = [1.0] * x.ndim
    for axis, scale in zip(axes, scales, strict=True):
        whole[axis] = scale
    return whole, None


def _after(before: Size, scale: float) -> Size:
    """The size of a scaled axis: a product in float32, as ONNX Runtime makes it."""
    if isinstance(before, int) and isinstance(scale, float):
        return int(np.float32(before) * np.float32(scale))
    return math.floor(before * as_meant(scale))


def _is_after(before: Size, scale: float, after: Size) -> bool:
    """Whether torch makes this size of the scale alone: it multiplies in 64 bits."""
    if isinstance(before, int) and isinstance(after, int):
        return after == math.floor(before * scale)
    return as_meant(scale) is scale


def _same(x: Tensor, axis: int, scales: list[float] | None, sizes: list[Size] | None) -> bool:
    if scales is not None:
        return scales[axis] == 1
    return sizes is not None and statically_known_true(sizes[axis] == x.shape[axis])


def _name_in_torch(
    call: Call, x: Tensor, mode: str, rule: str, rounding: str, scales: list[float] | None, sizes: list[Size] | None
) -> str | None:
    """How `torch.nn.functional.interpolate` calls the same computation, if it has it."""
    space = x.ndim - 2
    if mode == "nearest" and rule == "asymmetric" and rounding == "floor":
        return "nearest"
    if mode == "nearest" and rule in ("half_pixel", "pytorch_half_pixel") and rounding == "round_prefer_ceil":
        return "nearest-exact"
    whole = _whole_scales(x, scales, sizes)
    if mode == "nearest" and whole and rule in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round"):
        return "nearest"  # each pixel is repeated
    if mode == "nearest" and whole and whole <= {1, 2} and rule == "asymmetric" and rounding == "round_prefer_floor":
        return "nearest"
    after = sizes if sizes is not None else [_after(*each) for each in zip(x.shape, scales or [], strict=True)]
    if rule == "pytorch_half_pixel" and any(isinstance(size, int) and size == 1 for size in after[2:]):
        return None  # ONNX takes the first place, torch the one in the middle
    if mode == "linear" and rule in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return _LINEAR.get(space)
    if mode == "cubic" and rule in ("half_pixel", "align_corners") and call.attribute("cubic_coeff_a", -0.75) == -0.75:
        return "bicubic" if space == 2 else None
    return None


def _whole_scales(x: Tensor, scales: list[float] | None, sizes: list[Size] | None) -> set[int]:
    """Scales of height, width … where all are whole numbers; empty otherwise."""
    if scales is None:
        pairs = list(zip(x.shape[2:], (sizes or [])[2:], strict=False))
        if not all(isinstance(before, int) and isinstance(after, int) for before, after in pairs):
            return set()
        scales = [1.0, 1.0, *(after / before for before, after in pairs)]
    whole = {int(scale) for scale in scales[2:] if float(scale).is_integer() and scale >= 1}
    return whole if all(float(scale).is_integer() and scale >= 1 for scale in scales) else set()


def _matrix(call: Call, mode: str, rule: str, rounding: str, before: int, after: int, scale: float) -> Tensor:
    """(after, before): the share of each old place in each new one."""
    rows = torch.zeros(after, before, dtype=torch.float64)
    for place in range(after):
        at = _coordinate(rule, place, before, after, scale)
        if mode == "nearest":
            rows[place, min(max(_rounded(rounding, at), 0), before - 1)] = 1
            continue
        for old, share in _shares(call, mode, at, min(scale, 1.0) if call.attribute("antialias", 0) else 1.0):
            if not 0 <= old < before and call.attribute("exclude_outside", 0):
                continue
            rows[place, min(max(old, 0), before - 1)] += share
        rows[place] /= rows[place].sum()
    return rows


def _coordinate(rule: str, place: int, before: int, after: int, scale: float) -> float:
    if rule == "align_corners":
        return place * (before - 1) / (after - 1) if after > 1 else 0.0
    if rule == "asymmetric":
        return place / scale
    if rule == "pytorch_half_pixel" and after == 1:
        return 0.0
    if rule == "half_pixel_symmetric":
        adjusted = after / (scale * before)
        return before / 2 * (1 - adjusted) + (place + 0.5) / scale - 0.5
    return (place + 0.5) / scale - 0.5


def _rounded(how: str, at: float) -> int:
    if how == "floor":
        return math.floor(at)
    if how == "ceil":
        return math.ceil(at)
    return math.floor(at + 0.5) if how == "round_prefer_ceil" else math.ceil(at - 0.5)


def _shares(call: Call, mode: str, at: float, shrink: float) -> list[tuple[int, float]]:
    """Old places near `at` with their shares; a shrinking image spreads them (antialias)."""
    reach = (1.0 if mode == "linear" else 2.0) / shrink
    a = call.attribute("cubic_coeff_a", -0.75)
    found = []
    for old in range(math.floor(at - reach), math.ceil(at + reach) + 1):
        gap = abs(old - at) * shrink
        if mode == "linear":
            share = max(1 - gap, 0.0)
        elif gap <= 1:
            share = (a + 2) * gap**3 - (a + 3) * gap**2 + 1
        elif gap < 2:
            share = a * gap**3 - 5 * a * gap**2 + 8 * a * gap - 4 * a
        else:
            share = 0.0
        if share:
            found.append((old, share))
    return found


def _grid_sample(call: Call) -> Tensor:
    said: str = call.attribute("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(said, said)
    padding, aligned = call.attribute("padding_mode", "zeros"), bool(call.attribute("align_corners", 0))
    return F.grid_sample(call.tensor(0), call.tensor(1), mode, padding, aligned)


OPERATORS: dict[str, Callable[[Call], Any]] = {"Resize": _resize, "Upsample": _resize, "GridSample": _grid_sample}
