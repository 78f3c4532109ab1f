"""A traced network is compared with the torch module that it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penjing.core.errors import InputError, first_line
from penjing.core.graph.compare import farthest, judged, widened, wider
from penjing.core.graph.network import Network
from penjing.core.imports.torch_zoo import Found
from penjing.core.progress import plural


def compared_with_module(network: Network, found: Found, source: str, tolerance: float | None) -> dict[str, Any]:
    """How far the graph's answers are from the module's: see `judged`.

    Raises:
        InputError: further than is accepted, or other inputs or outputs than the module's.
    """
    inputs = network.inputs()
    given = pytree.tree_leaves((found.example, found.keyword))
    tensors = [value for value in given if isinstance(value, Tensor)]
    if len(tensors) != len(inputs):
        raise InputError(f"{source} ignores an input, or has one that is no tensor; give tensors that it uses")
    replaced = dict(zip(map(id, tensors), inputs, strict=True))
    example = pytree.tree_map(lambda value: replaced.get(id(value), value), (found.example, found.keyword))
    found.module.eval()

    def theirs(module: nn.Module, change: Callable[[Any], Any]) -> list[Tensor]:
        arguments, named = pytree.tree_map(change, example)
        try:
            with torch.no_grad():
                answers = pytree.tree_leaves(module(*arguments, **named))
        except Exception as error:  # code of anybody's
            said = f"{type(error).__name__}: {first_line(error)}{_other_types(module)}"
            raise InputError(f"{source} does not run on its example: {said}") from None
        answers = [value for value in answers if isinstance(value, Tensor)]
        if len(answers) != len(network.config.outputs):
            count = len(network.config.outputs)
            raise InputError(
                f"{source} gives {plural(len(answers), 'tensor')}, the traced network {count}; return a plain tuple"
            )
        return answers

    expected = theirs(found.module, lambda value: value)  # one that does not run is no matter of rounding

    def as_given() -> float:
        with torch.no_grad():
            return farthest(network(*inputs), expected)

    def in_float64() -> float:
        module = copy.deepcopy(found.module).double()
        ours = widened(network, torch.float64)(inputs)
        return farthest(ours, theirs(module, lambda value: wider(value, torch.float64)))

    measures = [("the module", as_given), ("the module, both in float64", in_float64)]
    return judged(source, measures, tolerance, lambda: _ADVICE)


def _other_types(module: nn.Module) -> str:
    kinds = {str(weight.dtype).removeprefix("torch.") for weight in module.parameters() if weight.is_floating_point()}
    if kinds <= {"float32"}:
        return ""
    return (
        f"; its weights are {', '.join(sorted(kinds))}: give inputs of that type (--input x:2x8:{min(kinds)}), or make "
        "all of it float32 with --dtype float32"
    )


_ADVICE = "does it draw random numbers, or keep something from call to call? Return a network without that"
