"""Which units go: the least important ones, under a share or a budget, in numbers that hardware likes.

Ranking `local` takes the share from every group; `global` compares units of all groups, each group's scores over their
mean; `isomorphic` does so only among groups of the same build (Fang et al., https://arxiv.org/abs/2407.04616). Scores
that are changes of the loss have one scale in all groups, and are compared as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import gcd
from typing import Literal

import numpy as np

from penjing.compress.prune.graph import Group
from penjing.compress.prune.importance import Scores
from penjing.core.errors import ConfigError, InputError

Scope = Literal["local", "global", "isomorphic"]
MAX_SHARE = 0.9  # of a group
Choice = list[tuple[Group, list[int]]]


def select(
    groups: Sequence[Group],
    scores: Scores,
    share: float,
    *,
    scope: Scope = "local",
    round_to: int = 8,
    max_share: float = MAX_SHARE,
    one_scale: bool = False,
) -> Choice:
    """The units to remove.

    Args:
        scores: for each group, (units,); the smallest go first.
        share: of the units, over the groups that are compared with each other; 0 ≤ share < 1.
        round_to: what stays is rounded up to a multiple of it, in indices: of units that take 8 each, any number fits.
        max_share: no group loses more than this.
        one_scale: the scores of different groups can be compared as they are.

    Returns:
        (group, ascending units) for each group that loses some.

    Raises:
        ConfigError: `share`, `max_share` or `round_to` out of range.
        InputError: scores that are no numbers.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"share={share}: at least 0 and below 1, as 0.3 for 30 % of the channels")
    if not 0 <= max_share < 1:
        raise ConfigError(f"max_share={max_share}: at least 0 and below 1")
    if round_to < 1:
        raise ConfigError(f"round_to={round_to}: 1 or more")
    for group, values in zip(groups, scores, strict=True):
        if not np.isfinite(values).all():
            raise InputError(f"the importance of {group.name} holds NaN or infinity: its weights or gradients do")
    result: Choice = []
    for members in _compared(groups, scope):
        of_members = [scores[i] for i in members]
        for index, count in _shares([groups[i] for i in members], of_members, share, scope, one_scale).items():
            group = groups[members[index]]
            kept = _rounded(group, len(group) - min(count, _part_of(max_share, len(group))), round_to)
            if kept < len(group):
                order = np.argsort(scores[members[index]], kind="stable")
                result.append((group, sorted(order[: len(group) - kept].tolist())))
    return result


def select_by_group(groups: Sequence[Group], scores: Scores, shares: Mapping[str, float], round_to: int = 8) -> Choice:
    """As `select`, with a share for each group.

    Args:
        shares: names of groups, with or without ".weight[dim 0]", or shell patterns of the short names → shares. The
            first that fits a group counts; groups that none fits stay whole.

    Raises:
        ConfigError: a name that fits no group; lists the groups.
    """
    fitting = [next((name for name in shares if _is_of(group, name)), None) for group in groups]
    for name in shares:
        if not any(_is_of(group, name) for group in groups):
            known = ", ".join(short_name(group) for group in groups)
            raise ConfigError(f"ratios: {name!r} is no group that can lose units; there are {known}")
    result: Choice = []
    for group, values, name in zip(groups, scores, fitting, strict=True):
        if name is not None:
            result += select([group], [values], shares[name], round_to=round_to)
    return result


def short_name(group: Group) -> str:
    """The name of a group as a recipe writes it: that of the layer whose outputs it is, such as "stem.conv"."""
    return group.name.removesuffix(".weight[dim 0]")


def _is_of(group: Group, name: str) -> bool:
    return name in (group.name, short_name(group)) or fnmatchcase(short_name(group), name)


def meet(target: float, measure: Callable[[float], float], *, steps: int = 12, tolerance: float = 0.005) -> float:
    """The smallest share for which `measure(share)` ≤ `target`, by bisection.

    Args:
        measure: what is left at a share (parameters, multiplications, bytes, seconds), as a part of the whole; falls
            as the share grows.
        tolerance: stop when this close below the target.

    Raises:
        InputError: even the largest share does not reach the target; says what it reaches.
    """
    low, high = 0.0, 0.95
    if measure(low) <= target:
        return low
    if (least := measure(high)) > target:
        raise InputError(f"pruning cannot reach {target:.1%}: at most {least:.1%} stay; protect less or aim higher")
    for _ in range(steps):
        middle = (low + high) / 2
        value = measure(middle)
        low, high = (low, middle) if value <= target else (middle, high)
        if target - tolerance <= value <= target:
            break
    return high


def _compared(groups: Sequence[Group], scope: Scope) -> list[list[int]]:
    """Groups whose units are ranked against each other, as indices."""
    if scope == "global":
        return [list(range(len(groups)))]
    if scope == "local":
        return [[index] for index in range(len(groups))]
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        build = tuple(sorted((place.tensor.rpartition(".")[2], place.dim) for place in group.places))
        alike[(build, len(group))].append(index)
    return list(alike.values())


def _shares(groups: Sequence[Group], scores: Scores, share: float, scope: Scope, one_scale: bool) -> dict[int, int]:
    """How many units each group loses."""
    if scope == "local":
        return {index: _part_of(share, len(group)) for index, group in enumerate(groups)}
    # Weights of different layers differ in scale: over the group's mean, their units can be compared.
    relative = scores if one_scale else [values / max(values.mean(), 1e-30) for values in scores]
    flat = np.concatenate(relative)
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    gone = np.argsort(flat, kind="stable")[: _part_of(share, flat.size)]
    return {index: int((owner[gone] == index).sum()) for index in range(len(groups))}


def _part_of(share: float, count: int) -> int:
    """How many whole ones of `count` are at most `share` of them."""
    return int(round(share * count, 6))  # 0.29 · 100 is 28.999999999999996 in floating point


def _rounded(group: Group, kept: int, round_to: int) -> int:
    step = round_to // gcd(round_to, group.indices_of_unit)
    return min(len(group), -(-max(kept, 1) // step) * step)
