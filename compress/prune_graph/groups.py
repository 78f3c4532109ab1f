"""Which groups of a graph can be trusted: half of the units of all of them leave once, and every result is compared.

Where it shows a difference, the groups behind it are kept whole and the others tried again, so that one part of a
network that pruning misunderstands does not spoil the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from torch import Tensor, fx
from torch.fx import Node

from penjing.compress.prune.graph import Analysis, Group
from penjing.compress.prune_graph.check import check_same
from penjing.compress.prune_graph.rewrite import Unfit, gone_units, is_gone, rewritten


@dataclass(frozen=True)
class Trust:
    """Groups whose units leave a graph that then computes the same as with zeros, and why others are kept whole."""

    groups: tuple[Group, ...]
    kept_whole: tuple[tuple[Group, str], ...]


def trusted(module: fx.GraphModule, analysis: Analysis, groups: Sequence[Group], inputs: Sequence[Tensor]) -> Trust:
    """Try `groups` on the inputs.

    Args:
        analysis: of `module`; `groups`: some of its groups.
    """
    left, doubted = list(groups), []
    generator = np.random.default_rng(0)
    chosen = {id(group): np.sort(generator.permutation(len(group))[: len(group) // 2]).tolist() for group in groups}
    while left:
        selection = [(group, chosen[id(group)]) for group in left]
        try:
            check_same(module, rewritten(module, analysis, selection), inputs)
            break
        except Unfit as error:
            guilty = _behind(error.node, analysis, left, chosen) or left
            doubted += [(group, str(error)) for group in guilty]
            left = [group for group in left if not any(group is other for other in guilty)]
    return Trust(tuple(left), tuple(doubted))


def _behind(node: Node, analysis: Analysis, groups: Sequence[Group], chosen: dict[int, list[int]]) -> list[Group]:
    """The groups with units in `node` or what it reads; else in the nearest results before it that have any."""
    gone = {id(group): gone_units(analysis, [(group, chosen[id(group)])]) for group in groups}
    seen, level = {node}, [node, *node.all_input_nodes]
    while level:
        found = [
            group
            for group in groups
            if any(is_gone(analysis, analysis.labels.get(near, ()), gone[id(group)]) for near in level)
        ]
        if found:
            return found
        seen.update(level)
        level = [given for near in level for given in cast(Node, near).all_input_nodes if given not in seen]
    return []
