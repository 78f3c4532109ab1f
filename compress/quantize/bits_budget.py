"""Mixed precision: which linear layers stay floating when INT8 weights may take a few more bits on average."""

from __future__ import annotations

import json
from typing import Any

from penjing.compress.decoder.check import input_hashes
from penjing.compress.decoder.settings import Recipe
from penjing.compress.sensitivity.study import RESULT_FILE
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError


def choose_kept(result: dict[str, Any], effective_bits: float, stored_bits: int = 32) -> list[str]:
    """The linear layers that stay floating so that weights take `effective_bits` on average, INT8 being 8.

    Most score for its size first; what no longer fits is passed over.

    Args:
        result: of `sensitivity.decoder_bits.sensitivity_to_bits`, with a width of 8.
        stored_bits: of a weight that stays floating.
    """
    linears = result["linears"]
    room = round((effective_bits - 8) * sum(row["parameters"] for row in linears), 3)  # bits; 9.2 is not quite 9.2
    kept = []
    for row in sorted(linears, key=lambda row: -row["scores"]["8"] / row["parameters"]):
        cost = (stored_bits - 8) * row["parameters"]
        if cost <= room:
            kept.append(row["name"])
            room -= cost
    return sorted(kept)


def kept_by_budget(recipe: Recipe) -> Recipe:
    """`recipe` with its budget of effective bits resolved into `quantize.keep`.

    Raises:
        ConfigError: the sensitivity file is missing, was made of another model, or has no width of 8.
    """
    quantize = recipe.quantize
    if quantize.effective_bits is None or quantize.sensitivity is None:
        return recipe
    path = quantize.sensitivity / RESULT_FILE if quantize.sensitivity.is_dir() else quantize.sensitivity
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        is_bits = result["kind"] == "bits"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"quantize.sensitivity = {path}: {error!r}; make it with "
            f"'penjing compress sensitivity {recipe.model} --bits'"
        ) from None
    if not is_bits or 8 not in result["settings"]["widths"]:
        raise ConfigError(f"quantize.sensitivity = {path} has no scores of 8 bits; make it with --bits --widths 8")
    if result["input"] != input_hashes(open_checkpoint(recipe.model)):
        raise ConfigError(f"quantize.sensitivity = {path} was made of another model than {recipe.model}; make it again")
    keep = tuple(dict.fromkeys((*quantize.keep, *choose_kept(result, quantize.effective_bits))))
    resolved = quantize.model_copy(update={"keep": keep, "effective_bits": None, "sensitivity": None})
    if "lm_head" in keep:
        resolved = resolved.model_copy(update={"lm_head": "keep"})
    return recipe.model_copy(update={"quantize": resolved})
