"""A point of the front as an ordinary recipe: the base with shares by group and the layers that stay floating."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from glob import escape
from pathlib import Path
from typing import Any

from penjing.compress.search.space import Space

HEALING = ("distill", "finetune")
SIZES = ("ratio", "ratios", "target", "rounds", "rank")  # of a prune step: what the point says instead


def point_recipe(base: dict[str, Any], space: Space, choice: Sequence[int], output: Path, name: str) -> dict[str, Any]:
    """The values of a recipe that makes the network of a combination, and heals it as `base` says.

    A step that would do nothing is left out: the prune, with the steps that heal it, where all groups stay whole, and
    the quantize where all layers stay floating.

    Args:
        base: values of the base recipe. output: of the search. name: of the point's recipe, such as front-01.toml.
    """
    ratios, floating = space.ratios(choice), space.floating(choice)
    stored = sum(each.kind == "bits" for each in space.variables) - len(floating)
    steps: list[dict[str, Any]] = []
    for step in deepcopy(base["steps"]):
        if step["kind"] == "prune":
            step = {key: value for key, value in step.items() if key not in SIZES} | {"ratios": ratios}
        elif step["kind"] == "quantize":
            step.pop("effective_bits", None)
            if floating:
                step["keep"] = [*step.get("keep", []), *map(escape, floating)]
        steps.append(step)
    idle = {*(() if stored else ("quantize",)), *(() if ratios else ("prune", *HEALING))}
    steps = [step for step in steps if step["kind"] not in idle]
    folder = output.with_name(f"{output.name}-{Path(name).stem.removeprefix('front-')}")
    return deepcopy(base) | {"output": str(folder), "steps": steps}
