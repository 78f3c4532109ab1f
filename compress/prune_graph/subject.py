"""A graph's checkpoint as what pruning takes: every group that can be trusted, whatever the network is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.prune.graph import Analysis, Group, analyse
from penjing.compress.prune.ranking import Choice
from penjing.compress.prune.subject import Part, Shapes
from penjing.compress.prune.surgery import Cut
from penjing.compress.prune_graph.check import check_same
from penjing.compress.prune_graph.groups import trusted
from penjing.compress.prune_graph.rewrite import Rewritten, Unfit, rewritten
from penjing.core.checkpoint.graph import graph_skeleton, load_network, save_graph
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, tensor_at, tensors_of
from penjing.core.progress import Progress


class GraphSubject:
    """See `Subject`. The weights are in memory, for every result is compared before anything is written.

    Raises:
        InputError: the folder is no checkpoint of a graph, is damaged, or holds NaN; names the tensor.
    """

    dropped: tuple[int, ...] = ()

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self._network = load_network(folder)
        self._progress = progress
        for name, tensor in tensors_of(self._network.module).items():
            if isinstance(tensor, nn.Parameter) and not torch.isfinite(tensor).all():
                raise InputError(
                    f"{folder}: {name} holds NaN or infinity; its training diverged: take an earlier checkpoint"
                )
        config, inputs = self._network.config, self._network.inputs()
        self.dense: nn.Module = self._network.module
        self.model: nn.Module = self._network.module
        self.example: tuple[Tensor, ...] = graph_skeleton(folder).inputs()
        self.inputs = len(inputs[0]) if config.batched else 1
        self.unit: str = "image" if config.pixels else "sample"
        self.kept_whole: dict[str, str] = {}

    def weights(self, name: str) -> Tensor | None:
        """See `Subject`."""
        tensor = tensor_at(self.model, name)
        return tensor.detach() if isinstance(tensor, nn.Parameter) else None

    def network(self) -> nn.Module:
        """See `Subject`."""
        return self._network.copy().module.float().eval()

    def parts(self, groups: Sequence[Group]) -> dict[Part, list[Group]]:
        """See `Subject`: everything is channels. Groups that fail when they are tried stay whole, which is said.

        Raises:
            InputError: all fail; says where.
        """
        self._progress.start("trying the groups", 1)
        trust = trusted(self._network.module, self._analysis, groups, self._network.inputs())
        self.kept_whole = {group.name: why for group, why in trust.kept_whole}
        if trust.kept_whole and not trust.groups:
            raise InputError(f"{self.folder}: nothing can leave, because {trust.kept_whole[0][1]}")
        for why in dict.fromkeys(self.kept_whole.values()):
            names = [name for name, reason in self.kept_whole.items() if reason == why]
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._progress.note(f"{names[0]}{more} stays whole: without half of its units, {why}")
        return {"channels": list(trust.groups)}

    def config_of(self, shapes: Shapes, choice: Choice) -> Rewritten:
        """See `Subject`: the graph without the units.

        Raises:
            InputError: they cannot leave together.
        """
        try:
            return rewritten(self._network.module, self._analysis, choice)
        except Unfit as error:
            raise InputError(f"{self.folder}: these units cannot leave: {error}; protect them") from None

    def build(self, config: Rewritten) -> nn.Module:
        """See `Subject`."""
        return config.module

    def item_bytes(self, name: str) -> int:
        """See `Subject`."""
        return tensor_at(self.model, name).element_size()

    def write(self, partial: Path, config: Rewritten, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """See `Subject`.

        Raises:
            InputError: the pruned network does not compute what the whole one does with the same units at zero.
        """
        self._progress.start("comparing with the network whose units are zero", 1)
        save_graph(partial, without(self._network, config), created_by)

    @cached_property
    def _analysis(self) -> Analysis:
        return analyse(self._network.module, self._network.inputs())


def without(network: Network, pruned: Rewritten) -> Network:
    """`pruned` as a network, once every result of it is that of `network` with the same units at zero.

    Raises:
        InputError: one is not; the first is named.
    """
    try:
        check_same(network.module, pruned, network.inputs())
    except Unfit as error:
        raise InputError(
            f"the pruned network is not what the whole one is with the same units at zero, first at {error}; protect "
            "what is computed there"
        ) from None
    return network.with_module(pruned.module)
