"""Mixed precision: which layers stay floating when weights may take a few more bits on average than INT8 does.

Of a decoder a file says what each layer costs, which `penjing compress sensitivity --bits` made, and the most score for
its size goes first. Of a graph the scores are found by `graph/bits.py`, and the set of layers with the largest sum is
chosen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from penjing.compress.decoder.check import checkpoint_hashes
from penjing.compress.decoder.settings import Int8Settings
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError

FLOAT_BITS, STORED_BITS = 32, 8  # of a weight; those within ±63 are stored in 8 too
GRAINS = 1 << 14  # of a larger budget, to which sizes are rounded up
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


def kept_by_budget(settings: D, model: Path) -> D:
    """`settings` for the decoder in `model` with their budget of effective bits resolved into `keep`.

    Raises:
        ConfigError: the sensitivity file is missing, was made of another model, or has no width of 8.
    """
    if settings.effective_bits is None or settings.sensitivity is None:
        return settings
    path = settings.sensitivity / RESULT_FILE if settings.sensitivity.is_dir() else settings.sensitivity
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
    keep = tuple(dict.fromkeys((*settings.keep, *choose_kept(result, settings.effective_bits))))
    resolved = settings.model_copy(update={"keep": keep, "effective_bits": None, "sensitivity": None})
    return resolved.model_copy(update={"lm_head": "keep"}) if "lm_head" in keep else resolved
