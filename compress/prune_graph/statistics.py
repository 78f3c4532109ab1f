"""Statistics of a graph's batch norms, estimated anew; see `compress/prune/batch_norm.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx import Node

from penjing.compress.prune.batch_norm import Moments, not_enough
from penjing.compress.samples.data import Samples
from penjing.compress.samples.graph import ExampleData
from penjing.core.checkpoint.graph import load_network, save_graph
from penjing.core.graph.network import operator_name, tensor_at
from penjing.core.manifest import read_manifest
from penjing.core.progress import Progress


def refresh_graph(folder: Path, samples: Samples, progress: Progress) -> dict[str, Any]:
    """Estimate the batch norms' statistics of the graph in `folder`, not yet published, from `samples`.

    The example that came with a network may be noise, which would ruin statistics that are right: where there are no
    other samples, nothing is done, which is said.

    Returns:
        How many batch norms were estimated, as "batch_norms".
    """
    network = load_network(folder)
    if isinstance(samples, ExampleData):
        if any(map(_has_statistics, network.module.graph.nodes)):
            progress.note("statistics of batch norms stay those of the whole network: [data] names nothing to see")
        return {"batch_norms": 0}
    progress.start("statistics of batch norms", 1)
    count = reestimate_graph(network.module, samples.inputs())
    if count:
        save_graph(folder, network, read_manifest(folder).created_by)
    progress.advance()
    return {"batch_norms": count}


@torch.no_grad()
def reestimate_graph(module: fx.GraphModule, inputs: Iterable[tuple[Tensor, ...]]) -> int:
    """Set running mean and variance of every batch norm of a graph, in place, to the moments of its inputs.

    As `reestimate_batch_norms`: each norm normalises by its batch's own moments meanwhile.

    Returns:
        How many batch norms there are; with none, `inputs` is not touched.

    Raises:
        InputError: there are batch norms and no input, or a single value a channel.
    """
    moments = {node: Moments() for node in module.graph.nodes if _has_statistics(node)}
    if not moments:
        return 0
    for arguments in inputs:
        _Watched(module, moments).run(*arguments)
    for node, found in moments.items():
        if found.count < 2:
            raise not_enough(found.count)
        for position, value in zip((3, 4), found.result(), strict=True):
            tensor_at(module, str(node.args[position].target)).copy_(value)
    return len(moments)


def _has_statistics(node: Node) -> bool:
    return operator_name(node) == "batch_norm" and all(
        isinstance(given, Node) and given.op == "get_attr" for given in node.args[3:5]
    )


class _Watched(fx.Interpreter):
    """Runs a graph whose batch norms take the moments of the batch, and keeps these."""

    def __init__(self, module: fx.GraphModule, moments: dict[Node, Moments]) -> None:
        super().__init__(module)
        self._moments = moments

    def run_node(self, n: Node) -> Any:
        if n not in self._moments:
            return super().run_node(n)
        x, weight, bias = cast(Any, self.map_nodes_to_values(n.args[:3], n))
        self._moments[n].add(x.movedim(1, -1).flatten(0, -2))
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, True, 0.0, cast(float, n.args[7]))
