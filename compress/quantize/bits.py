"""Mixed precision: which layers stay floating when weights may take a few more bits on average than INT8 does, and
which get 8 bits when they may take more bytes than 4 bits do.

Of a decoder a file says what each layer costs, which `penjing compress sensitivity --bits` made, and the most score for
its size goes first above 8 bits; among 4 and 8 the set of layers with the largest sum is chosen. So it is of a graph,
whose scores are found by `graph/bits.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penjing.compress.decoder.check import checkpoint_hashes, four_bits, int8_needs
from penjing.compress.decoder.settings import Int8Settings
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.models.tensor_names import tensor_shapes

FLOAT_BITS, STORED_BITS = 32, 8  # of a weight; those within ±63 are stored in 8 too
GRAINS = 1 << 14  # of a larger budget, to which sizes are rounded up
GROUPED = "4 in groups"  # of `sensitivity.bits`: the score of W4A8
RESULT_FILE = "sensitivity.json"  # of `penjing compress sensitivity`
D = TypeVar("D", bound=Int8Settings)


def keep_floating(scores: dict[str, float], sizes: dict[str, int], budget: float) -> tuple[str, ...]:
    """The names whose sizes together are within `budget` and whose scores sum up to the most (a knapsack, by dynamic
    programming over sizes)."""
    names = [name for name in scores if scores[name] > 0 and sizes[name] <= budget]
    grains = min(int(budget), GRAINS)
    best = np.zeros(grains + 1)
    taken = np.zeros((len(names), grains + 1), dtype=np.bool_)
    costs = [-(-sizes[name] * grains // int(budget)) for name in names]
    for row, name, cost in zip(taken, names, costs, strict=True):
        with_it = np.full_like(best, -np.inf)
        with_it[cost:] = best[: grains + 1 - cost] + scores[name]
        row[:] = with_it > best
        best = np.maximum(best, with_it)
    room, chosen = grains, []
    for row, name, cost in zip(taken[::-1], names[::-1], costs[::-1], strict=True):
        if row[room]:
            chosen.append(name)
            room -= cost
    return tuple(chosen[::-1])


def choose_kept(result: dict[str, Any], budget: float) -> list[str]:
    """The linear layers that stay floating so that weights take `budget` bits on average, INT8 being 8.

    Most score for its size first; what no longer fits is passed over.

    Args:
        result: of `sensitivity.bits.sensitivity_to_bits` of a decoder, with a width of 8.
    """
    linears = result["linears"]
    room = round((budget - STORED_BITS) * sum(row["parameters"] for row in linears), 3)  # bits; 9.2 is not quite 9.2
    kept = []
    for row in sorted(linears, key=lambda row: -row["scores"]["8"] / row["parameters"]):
        cost = (FLOAT_BITS - STORED_BITS) * row["parameters"]
        if cost <= room:
            kept.append(row["name"])
            room -= cost
    return sorted(kept)


def sensitivity_file(named: Path) -> Path:
    """The scores that a step's `sensitivity` names, by their file or by the folder that holds it."""
    return named / RESULT_FILE if named.is_dir() else named


def kept_by_budget(settings: D, model: Path) -> D:
    """`settings` for the decoder in `model` with their budget resolved into `keep`, or `keep_int8`.

    Raises:
        ConfigError: the sensitivity file is missing, was made of another model, or lacks a width; or the budget is
            below what 4 bits take.
    """
    if settings.sensitivity is None:
        return settings
    path = sensitivity_file(settings.sensitivity)
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        is_bits = result["kind"] == "bits"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"sensitivity = {path}: {error!r}; make it with 'penjing compress sensitivity {model} --bits'"
        ) from None
    if not is_bits or 8 not in result["settings"]["widths"]:
        raise ConfigError(f"sensitivity = {path} has no scores of 8 bits; make it with --bits --widths 8")
    if result["input"] != checkpoint_hashes(open_checkpoint(model)):
        raise ConfigError(f"sensitivity = {path} was made of another model than {model}; make it again")
    if settings.effective_bits is None:
        return _eights_by_budget(settings, result, model)
    keep = tuple(dict.fromkeys((*settings.keep, *choose_kept(result, settings.effective_bits))))
    resolved = settings.model_copy(update={"keep": keep, "effective_bits": None, "sensitivity": None})
    return resolved.model_copy(update={"lm_head": "keep"}) if "lm_head" in keep else resolved


def _eights_by_budget(settings: D, result: dict[str, Any], model: Path) -> D:
    assert settings.budget_mb is not None  # a sensitivity goes with one of the two budgets
    if any(GROUPED not in row["scores"] for row in result["linears"]):
        raise ConfigError(f"sensitivity = {settings.sensitivity} has no scores of W4A8; make it with --widths 8,4")
    config = open_checkpoint(model).config
    fours = settings.model_copy(update={"budget_mb": None, "sensitivity": None})
    least = int8_needs(fours, config, 0).artifact
    room = settings.budget_mb * 1e6 - least
    if room < 0:
        raise ConfigError(f"budget_mb={settings.budget_mb:g} is below the {least / 1e6:.1f} MB of 4 bits everywhere")
    shapes, gains, sizes = tensor_shapes(config), dict[str, float](), dict[str, int]()
    for row in result["linears"]:
        name = row["name"]
        if name != "lm_head" and not fours.keeps(name) and fours.bits(name) == 4:
            gains[name] = row["scores"][GROUPED] - row["scores"]["8"]
            rows = shapes[f"{name}.weight"][0]
            sizes[name] = row["parameters"] + 4 * rows - four_bits(fours, row["parameters"], rows)
    chosen = keep_floating(gains, sizes, room) if room >= 1 else ()
    return fours.model_copy(update={"keep_int8": (*fours.keep_int8, *chosen)})
