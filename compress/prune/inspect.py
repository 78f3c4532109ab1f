"""`penjing compress inspect`: what a checkpoint is made of, layer by layer, and what pruning could take from it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from penjing.compress.measure.skeleton import Skeleton
from penjing.compress.prune.graph import DependencyGraph, Group, dependency_graph
from penjing.core.progress import Progress, error_console


def inspect_network(folder: Path, skeleton: Skeleton, progress: Progress, *, groups: bool = True) -> dict[str, Any]:
    """Sizes of each layer and the groups of channels, heads and features that can leave together; JSON-ready.

    Weights are not read: the architecture is built without storage. `macs` are multiply-accumulates for one image or
    one token (attention among `TOKENS` tokens included), `bytes` those of FP32 weights.

    Args:
        skeleton: the network of the checkpoint in `folder`.
        groups: whether pruning is asked what can leave together.

    Raises:
        InputError: the network cannot be analysed.
    """
    model, example, inputs = skeleton.model, skeleton.example, skeleton.inputs
    progress.start("analysing the network", 2)
    found = _groups(dependency_graph(model, example)) if groups else []
    progress.advance()
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "shape": list(layer.shape),
            "parameters": layer.parameters,
            "bytes": 4 * layer.parameters,
            "macs": layer.macs // inputs,
        }
        for layer in skeleton.layers()
    ]
    progress.advance()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "schema_version": 1,
        "checkpoint": str(folder),
        "model_type": type(model).__name__,
        "parameters": parameters,
        "bytes": 4 * parameters,
        "macs": sum(layer["macs"] for layer in layers),
        "macs_per": skeleton.unit,
        "layers": layers,
        "groups": found,
    }


def print_inspection(result: dict[str, Any]) -> None:
    """Two tables on standard error: layers, layers of the same shape as one line each; and groups."""
    from rich.table import Table

    console = error_console()
    layers = Table(box=None, pad_edge=False)
    layers.add_column("layer", overflow="fold", min_width=24)
    layers.add_column("shape", no_wrap=True)
    for column in ("×", "parameters", "MB in FP32", f"MACs per {result['macs_per']}"):
        layers.add_column(column, justify="right")
    for alike in _alike(result["layers"]):
        first, total = alike[0], {key: sum(row[key] for row in alike) for key in ("parameters", "bytes", "macs")}
        shape = " × ".join(map(str, first["shape"]))
        numbers = (f"{total['parameters']:,}", f"{total['bytes'] / 1e6:,.1f}", f"{total['macs']:,}")
        name = first["name"] if len(alike) == 1 else _without_numbers(first["name"])
        layers.add_row(name, shape, str(len(alike)), *numbers)
    layers.add_row(
        "all", "", "", "", f"{result['parameters']:,}", f"{result['bytes'] / 1e6:,.1f}", f"{result['macs']:,}"
    )
    console.print(layers)
    if not result["groups"]:
        return
    groups = Table("what can leave together", box=None, pad_edge=False)
    for column in ("groups", "units", "indices a unit"):
        groups.add_column(column, justify="right")
    for group in result["groups"]:
        groups.add_row(", ".join(group["pattern"]), str(group["count"]), str(group["units"]), str(group["indices"]))
    console.print()
    console.print(groups)


def _alike(layers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Layers whose names differ in numbers only, and that have one shape."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for layer in layers:
        found[_without_numbers(layer["name"]), *layer["shape"]].append(layer)
    return list(found.values())


def _groups(graph: DependencyGraph) -> list[dict[str, Any]]:
    """Groups of the same build as one row, so that a deep network stays readable."""
    alike: dict[tuple[Any, ...], list[Group]] = defaultdict(list)
    for group in graph.groups:
        pattern = tuple(sorted({_without_numbers(str(place)) for place in group.places}))
        alike[pattern, len(group), group.indices_of_unit].append(group)
    return [
        {
            "name": members[0].name,
            "count": len(members),
            "units": units,
            "indices": indices,
            "pattern": list(pattern),
            "members": [group.name for group in members],
        }
        for (pattern, units, indices), members in alike.items()
    ]


def _without_numbers(name: str) -> str:
    return ".".join("N" if part.isdigit() else part for part in name.split("."))
