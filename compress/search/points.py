"""A point of the front as an ordinary recipe: the base with what leaves, and the bits of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from glob import escape
from pathlib import Path
from typing import Any

from penjing.compress.search.recipe import GONE, PACKED, STORED
from penjing.compress.search.space import Space

HEALING = ("distill", "finetune")
SIZES = ("ratio", "ratios", "target", "rounds", "rank", "parts", "layers", "layers_by")
"""Of a prune step: what the point says instead."""
FOUR_BITS = ("weights_bits", "group", "offsets", "keep_int8")
BUDGETS = ("effective_bits", "budget_mb", "sensitivity")


def point_recipe(base: dict[str, Any], steps: list[dict[str, Any]], output: Path, name: str) -> dict[str, Any]:
    """The values of a recipe that makes the network of a combination, and heals it as `base` says.

    Args:
        base: values of the base recipe. steps: of `graph_steps` or `decoder_steps`. output: of the search.
        name: of the point's recipe, such as front-01.toml.
    """
    folder = output.with_name(f"{output.name}-{Path(name).stem.removeprefix('front-')}")
    return deepcopy(base) | {"output": str(folder), "steps": steps}


def graph_steps(base: dict[str, Any], space: Space, choice: Sequence[int]) -> list[dict[str, Any]]:
    """The steps of a combination of a graph or a classifier.

    A step that would do nothing is left out: the prune, with the steps that heal it, where all groups stay whole, and
    the quantize where all layers stay floating.

    Args:
        base: values of the base recipe.
    """
    ratios, floating = space.ratios(choice), space.floating(choice)
    stored = sum(each.kind == "bits" for each in space.variables) - len(floating)
    steps: list[dict[str, Any]] = []
    for step in deepcopy(base["steps"]):
        if step["kind"] == "prune":
            step = _unsized(step) | {"ratios": ratios}
        elif step["kind"] == "quantize":
            step.pop("effective_bits", None)
            if floating:
                step["keep"] = [*step.get("keep", []), *map(escape, floating)]
        steps.append(step)
    return _needed(steps, pruned=bool(ratios), quantized=bool(stored))


def decoder_steps(
    base: dict[str, Any], space: Space, choice: Sequence[int], bits: int, layers: int
) -> list[dict[str, Any]]:
    """The steps of a combination of a decoder. Layers that stay are numbered anew, as the steps see them.

    Args:
        base: values of the base recipe.
        bits: of layers that have no choice of them. layers: how many the network has.
    """
    taken = list(zip(space.variables, choice, strict=True))
    names = dict.fromkeys(each.name for each in space.variables)
    gone = {int(each.name.split(".")[2]) for each, at in taken if each.kind == "layer" and each.options[at] == GONE}

    def renumbered(name: str) -> str:
        number = int(name.split(".")[2])
        return f"model.layers.{number - sum(each < number for each in gone)}"

    left = [name for name in names if int(name.split(".")[2]) not in gone]
    ratios = {
        f"{renumbered(each.name)}.mlp.gate_proj": round(1 - each.options[at], 9)
        for each, at in taken
        if each.kind == "layer" and at and each.name in left
    }
    stored = {each.name: each.options[at] for each, at in taken if each.kind == "bits"}
    seen = {each.name: int(each.options[at]) for each, at in taken if each.kind == "attention" and at}
    windows = [seen.get(f"model.layers.{number}", 0) for number in range(layers) if number not in gone]
    eight = [f"{renumbered(name)}.*" for name in left if stored.get(name, bits) == STORED]
    four = bits == PACKED if not stored else any(stored.get(name, bits) == PACKED for name in left)
    steps: list[dict[str, Any]] = []
    for step in deepcopy(base["steps"]):
        if step["kind"] == "prune":
            parts = [*(["ffn"] if ratios else []), *(["layers"] if gone else [])]
            step = _unsized(step) | {"parts": parts}
            step |= ({"ratios": ratios} if ratios else {}) | ({"layers": sorted(gone)} if gone else {})
        elif step["kind"] == "quantize":
            unused = BUDGETS if four else (*BUDGETS, *FOUR_BITS)
            step = {key: value for key, value in step.items() if key not in unused}
            if four:
                step |= {"weights_bits": PACKED, "keep_int8": eight}
        steps.append(step)
    steps = _needed(steps, pruned=bool(ratios or gone), quantized=True, heals=any(windows))
    if any(windows):
        pruned = [place for place, step in enumerate(steps) if step["kind"] == "prune"]
        steps.insert(pruned[0] + 1 if pruned else 0, {"kind": "window", "windows": windows})
    return steps


def _unsized(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key not in SIZES}


def _needed(steps: list[dict[str, Any]], *, pruned: bool, quantized: bool, heals: bool = False) -> list[dict[str, Any]]:
    """Without what would do nothing; `heals`: something beside a prune is to be healed."""
    idle = {*(() if quantized else ("quantize",)), *(() if pruned else ("prune",))}
    idle |= set() if pruned or heals else {*HEALING}
    return [step for step in steps if step["kind"] not in idle]
