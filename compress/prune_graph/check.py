"""Is a graph without some units what the whole graph is with the same units at zero? Each result is compared.

Both run beside each other in float64 on the example, so that what is measured is no rounding. A mean or a norm over
units is, in the whole graph too, taken over those that stay; everything else sees zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.fx.node import map_arg

from penjing.compress.prune_graph.rewrite import Kept, Rewritten, Unfit
from penjing.core.errors import first_line
from penjing.core.graph.network import operator_name, tensor_at
from penjing.kernels.dispatch import force_torch

TOLERANCE = 1e-5  # of the largest value of a result
NOISE = 1e-10  # of the largest value of what a result is made of: float64 has 16 digits
_OVER_WHAT_STAYS = (
    *("mean", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "prod"),
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "native_group_norm"),
)


@torch.no_grad()
def check_same(module: fx.GraphModule, pruned: Rewritten, inputs: Sequence[Tensor]) -> None:
    """Compare every result of `pruned` with what stays of that of `module`.

    Args:
        inputs: of both, on the CPU.

    Raises:
        Unfit: they differ, or the pruned graph does not run; the first node where that shows.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with force_torch():
            _Pair(module, pruned, [_wide(value) for value in inputs]).run()
    finally:
        torch.set_default_dtype(default)


class _Pair:
    """Both graphs, node by node; results that nobody reads any more are given up."""

    def __init__(self, module: fx.GraphModule, pruned: Rewritten, inputs: list[Tensor]) -> None:
        self._module, self._pruned, self._inputs = module, pruned, iter(inputs)
        self._whole: dict[Node, Any] = {}
        self._short: dict[Node, Any] = {}
        self._origin = {new: old for old, new in pruned.nodes.items()}
        self._reads = Counter(given for node in module.graph.nodes for given in node.all_input_nodes)

    def run(self) -> None:
        """See `check_same`."""
        waiting = iter(cast(list[Node], list(self._pruned.module.graph.nodes)))
        for node in cast(list[Node], list(self._module.graph.nodes)):
            if node.op == "output":
                return
            self._run_whole(node)
            for new in waiting:
                self._run_short(node, new)
                if self._origin.get(new) is node:
                    break
            self._compare(node)
            for given in node.all_input_nodes:
                self._reads[given] -= 1
                if not self._reads[given]:
                    self._whole.pop(given, None)
                    self._short.pop(self._pruned.nodes[given], None)

    def _run_whole(self, node: Node) -> None:
        kept = self._pruned.kept.get(node, {})
        if node.op == "placeholder":
            self._whole[node] = next(self._inputs)
        elif node.op == "get_attr":
            self._whole[node] = _masked(_wide(tensor_at(self._module, str(node.target))), kept)
        elif operator_name(node) in _OVER_WHAT_STAYS and any(self._pruned.kept.get(n) for n in node.all_input_nodes):
            # As the pruned graph does it, on what stays of the whole one's own values.
            new = self._pruned.nodes[node]
            given = {
                self._pruned.nodes[n]: _taken(self._whole[n], self._pruned.kept.get(n, {}))
                for n in node.all_input_nodes
            }
            self._whole[node] = _spread(_called(new, given), kept, node.meta["val"])
        else:
            self._whole[node] = _called(node, self._whole)

    def _run_short(self, node: Node, new: Node) -> None:
        try:
            if new.op == "placeholder":
                self._short[new] = self._whole[node]
            elif new.op == "get_attr":
                self._short[new] = _wide(tensor_at(self._pruned.module, str(new.target)))
            else:
                self._short[new] = _called(new, self._short)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise Unfit(node, f"it does not run: {first_line(error)}") from None

    def _compare(self, node: Node) -> None:
        whole, short = self._whole[node], self._short[self._pruned.nodes[node]]
        kept = self._pruned.kept.get(node, {})
        pairs = zip(whole, short, kept, strict=True) if isinstance(kept, list) else [(whole, short, kept)]
        for expected, found, stays in pairs:
            if not isinstance(expected, Tensor):
                continue
            expected = _taken(expected, stays)
            if expected.shape != found.shape:
                raise Unfit(node, f"its shape is {list(found.shape)}, not {list(expected.shape)}")
            if not _close(found, expected, [self._whole[given] for given in node.all_input_nodes]):
                raise Unfit(node, "its values differ from those of the network whose units are zero")


def _close(found: Tensor, expected: Tensor, given: list[Any]) -> bool:
    if not found.is_floating_point():
        return bool((found == expected).all())
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(found), finite) or not found.numel():
        return not found.numel()
    sizes = [float(value.abs().max()) for value in given if isinstance(value, Tensor) and _measurable(value)]
    scale = float(expected[finite].abs().max()) if finite.any() else 0.0
    bound = TOLERANCE * scale + NOISE * max(sizes, default=0.0)
    return not finite.any() or float((found - expected)[finite].abs().max()) <= bound


def _measurable(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() > 0 and bool(torch.isfinite(value).all())


def _called(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    target = cast(Any, node.target)
    return target(*map(_double, args), **{key: _double(value) for key, value in kwargs.items()})


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _wide(value: Tensor) -> Tensor:
    return value.detach().double() if value.is_floating_point() else value.detach()


def _masked(value: Tensor, kept: Kept) -> Tensor:
    for dim, indices in kept.items():
        mask = torch.zeros([value.shape[dim] if d == dim else 1 for d in range(value.ndim)], dtype=value.dtype)
        mask.view(-1)[torch.from_numpy(indices)] = 1
        value = value * mask
    return value


def _taken(value: Any, kept: Any) -> Any:
    if isinstance(kept, dict) and isinstance(value, Tensor):
        for dim, indices in kept.items():
            value = value.index_select(dim, torch.from_numpy(indices))
    return value


def _spread(value: Any, kept: Any, like: Any) -> Any:
    """What stays at its places in the whole result, zeros elsewhere."""
    if isinstance(kept, list):
        return [_spread(part, stays, whole) for part, stays, whole in zip(value, kept, like, strict=True)]
    for dim, indices in kept.items():
        shape = [like.shape[dim] if d == dim else size for d, size in enumerate(value.shape)]
        value = value.new_zeros(shape).index_copy(dim, torch.from_numpy(indices), value)
    return value
