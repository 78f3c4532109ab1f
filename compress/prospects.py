"""What pruning and INT8 can take of a graph, before anything is trained or calibrated: for `penjing graph`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import Node

from penjing.compress.graph.place import FUSED, PRODUCTS, apply_quantization, joins, products, quantizer_of
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune_graph.subject import GraphSubject
from penjing.compress.quantize.targets import GraphSettings, TargetName
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, operator_name
from penjing.core.progress import Progress, error_console, plural


def prospects(folder: Path, network: Network, target: TargetName, progress: Progress) -> dict[str, Any]:
    """What can leave, and what becomes integers; JSON-ready.

    Args:
        folder: a graph's checkpoint, and `network`: what lies in it.
        target: for whose rules quantizers are placed.

    Returns:
        "pruning": groups and units that can leave, and "whole": the groups that stay, each with its reason;
        "int8": for the target, the layers that multiply integers, those that stay floating, and how many operators of
        each kind run between integers or not. Either has "none", a reason, where nothing can be taken.
    """
    return {"pruning": _pruning(folder, progress), "int8": _integers(network, target)}


def _pruning(folder: Path, progress: Progress) -> dict[str, Any]:
    try:
        subject = GraphSubject(folder, progress)
        groups = dependency_graph(subject.model, subject.example).groups
        parts = subject.parts(groups)
    except InputError as error:
        return {"none": str(error), "groups": 0, "units": 0, "whole": {}}
    left = [group for found in parts.values() for group in found]
    if not left:
        return {"none": "no channels, heads or widths can leave", "groups": 0, "units": 0, "whole": subject.kept_whole}
    return {"groups": len(left), "units": sum(map(len, left)), "whole": subject.kept_whole}


def _integers(network: Network, target: TargetName) -> dict[str, Any]:
    try:
        made = apply_quantization(network, GraphSettings(target=target))
    except InputError as error:
        return {"target": target, "none": str(error), "layers": [], "floating_layers": [], "operators": {}}
    found = list(products(made))
    operators: dict[str, Counter[str]] = {"integer": Counter(), "floating": Counter()}
    for node in made.module.graph.nodes:
        if operator_name(node) and isinstance(node.meta.get("val"), Tensor | list | tuple):  # of many results at once
            kind = "integer" if _on_integers(made, node) else "floating"
            operators[kind][operator_name(node)] += 1
    return {
        "target": target,
        "layers": [product.name for product in found if product.rounding is not None],
        "floating_layers": [product.name for product in found if product.rounding is None],
        "operators": {kind: dict(counted.most_common()) for kind, counted in operators.items()},
    }


def _on_integers(network: Network, node: Node) -> bool:
    """Whether a kernel of integers computes the operator, or takes it in: what it reads is rounded then."""
    name, read = operator_name(node), node.all_input_nodes
    if name in FUSED:
        behind = read[0]
        return len(behind.users) == 1 and operator_name(behind) in (*PRODUCTS, "add") and _on_integers(network, behind)
    if name not in PRODUCTS and not joins(node):
        return False
    values = [value for value in read[:2] if isinstance(value.meta.get("val"), Tensor)]
    return bool(values) and all(quantizer_of(network, value) is not None for value in values)


def print_prospects(found: dict[str, Any]) -> None:
    """A few lines on standard error; groups that stay whole were told while they were tried."""
    console, pruning, integers = error_console(), found["pruning"], found["int8"]
    if "none" in pruning:
        console.print(f"Pruning takes nothing: {pruning['none']}.")
    else:
        units, groups = plural(pruning["units"], "unit"), plural(pruning["groups"], "group")
        console.print(f"Pruning can take channels, heads or widths: {units} in {groups}.")
    if "none" in integers:
        console.print(f"INT8 takes nothing: {integers['none']}.")
        return
    floating = integers["floating_layers"]
    console.print(
        f"INT8 for {integers['target']} takes {len(integers['layers'])} of {len(integers['layers']) + len(floating)} "
        "convolutions and linear layers."
    )
    if floating:
        console.print(f"  Too small, or not of 32 bits: {', '.join(floating)}.")
    for kind, said in (("integer", "Run on integers"), ("floating", "Stay floating")):
        if counted := integers["operators"][kind]:
            console.print(f"  {said}: {', '.join(f'{count} {name}' for name, count in counted.items())}.")
