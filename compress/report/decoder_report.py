"""`report.json`: what the compression cost and gained, with everything needed to make it again."""

from __future__ import annotations

import math
from typing import Any

from penjing.compress.decoder.settings import Recipe
from penjing.compress.work import StepRecord
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.info import processor, versions
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import megabytes

MEASURES = ("fp32", "int8")
"""The steps that measure perplexity, and make nothing."""


def make_report(
    recipe: Recipe, checkpoint: Checkpoint, steps: list[StepRecord], command: str, num_resumed: int
) -> dict[str, Any]:
    """Everything `report.json` holds, JSON-ready.

    Sizes are of the weights in bytes, times in seconds: `seconds` of all steps, `seconds_measuring` of `MEASURES` among
    them. `peak_memory_bytes` is the largest resident memory above what the process held before the first step,
    `perplexity.*.change` (int8 − fp32) / fp32.
    """
    results = {step.name: step.result for step in steps}
    parameters = sum(math.prod(shape) for shape in tensor_shapes(checkpoint.config).values())
    perplexities = {
        name: {"fp32": before, "int8": results["int8"][name], "change": results["int8"][name] / before - 1}
        for name, before in results["fp32"].items()
    }
    linears = [
        {"name": _full_name(step.name, name), **error}
        for step in steps
        for name, error in step.result.get("errors", {}).items()
    ]
    peak = max(step.peak_memory_bytes for step in steps)
    return {
        "schema_version": 1,
        "model": str(recipe.model),
        "source": checkpoint.manifest.created_by if checkpoint.manifest is not None else {},
        "parameters": parameters,
        "bytes_fp32": 4 * parameters,
        "bytes_int8": results["assemble"]["bytes"],
        "perplexity_fp32": perplexities["prose"]["fp32"],
        "perplexity_int8": perplexities["prose"]["int8"],
        "perplexity": perplexities,
        "parity": results["parity"]["differences"],
        "linears": linears,
        "seconds": sum(step.seconds for step in steps),
        "seconds_measuring": sum(step.seconds for step in steps if step.name in MEASURES),
        "peak_memory_bytes": peak,
        "peak_memory_of_fp32": peak / (4 * parameters),
        "steps": [
            {"name": step.name, "seconds": step.seconds, "peak_memory_bytes": step.peak_memory_bytes} for step in steps
        ],
        "steps_resumed": num_resumed,
        "recipe": recipe.settings(),
        "command": command,
        "versions": versions(),
        "processor": processor(),
    }


def summary_line(report: dict[str, Any]) -> str:
    """One line for the terminal."""
    texts = ", ".join(
        f"{name} perplexity {values['fp32']:.2f} → {values['int8']:.2f} ({values['change']:+.2%})"
        for name, values in report["perplexity"].items()
    )
    return (
        f"{megabytes(report['bytes_fp32'])} → {megabytes(report['bytes_int8'])} "
        f"({report['bytes_fp32'] / report['bytes_int8']:.1f}×), {texts}, "
        f"{report['seconds']:.0f} s ({report['seconds_measuring']:.0f} s for measuring perplexity), "
        f"peak memory {megabytes(report['peak_memory_bytes'])}"
    )


def _full_name(step: str, linear: str) -> str:
    return f"model.layers.{int(step.removeprefix('layer_'))}.{linear}" if step.startswith("layer_") else linear
