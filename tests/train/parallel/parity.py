"""When a mesh gives the numbers of one process, and the forms in which it is tried."""

from __future__ import annotations

from typing import Any

from tests.train.parallel.matrix import VOCAB

UNEVEN = {"accumulation": 3, "ragged": True, "clip": 0.5}


def variants(meshes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each mesh in float64 and, with clipping, recomputation and AdamW, in float32; both of unequal token counts."""
    cases: dict[str, dict[str, Any]] = {}
    for name, case in meshes.items():
        cases[f"{name}, exact"] = {"double": True, "accumulation": 3, "ragged": True, **case}
        cases[f"{name}, float32"] = {**UNEVEN, "recompute": "full", "optimizer": "adamw", **case}
    return cases


def by_default(cases: dict[str, dict[str, Any]], float32: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The exact form of each mesh among `cases`, and the other form of the meshes of `float32`."""
    return {name: case for name, case in cases.items() if not name.endswith(", float32") or name[:-9] in float32}


def layered(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each case with two layers, or three in a pipeline of two stages, of which one then has two."""
    return {
        name: case | {"model": {"num_hidden_layers": 3 if "pp 2" in name else 2} | case.get("model", {})}
        for name, case in cases.items()
    }


def faults(result: dict[str, Any], case: dict[str, Any]) -> list[str]:
    """What in the `result` of `case` is not as in one process; nothing, where all is well."""
    limit = case.get("limit", 1e-10 if case.get("double") else 1e-5)
    width = VOCAB // case["parallel"].get("tp", 1)
    rules = {
        "the weights begin as one process has them, in every bit": result["initial"] == 0,
        "no part of a parameter is missing": result["missing"] == [],
        "who has the same parameter has the same bits of it": result["apart"] == [],
        # the last of 3 steps has another
        "micro-batches are resized": len(result["sizes"]) == (2 if case["parallel"].get("balance") else 0),
        # rank 0 may have no head
        "no process has all logits": result["widths"] in ([width], []),
        "gradients are so large that the limit means something": result["scale"] > 1e-3,
        "loads and balance losses are near, which are in float32": result["experts"] <= 1e-5,
    }
    numbers = ("losses", "norms", "evaluation", "gradients", "weights")
    rules |= {f"{name} are within {limit:g}": result[name] <= limit for name in numbers}
    return [f"{rule}: {result}" for rule, holds in rules.items() if not holds]
