"""Which layers a pipeline stage gets: the contiguous split whose heaviest stage is as light as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from penjing.core.errors import ConfigError
from penjing.core.progress import plural


def split_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """First layer of each stage, and at last the number of layers: stage s has the layers bounds[s] … bounds[s+1] − 1.

    Of all splits with the smallest heaviest stage it takes the one with the smallest sum of squares, so the rest is
    even too. Every stage has a layer. Exact; O(layers² log layers + stages × layers × layers of a stage).

    Args:
        costs: seconds (or FLOPs) of each layer, 0 or more.

    Raises:
        ConfigError: more stages than layers, none at all, or a cost that is no cost.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"{plural(len(costs), 'layer')} cannot be split into {plural(stages, 'stage')}; take 1 … {len(costs)}"
        )
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ConfigError("layer costs must be finite and not negative")
    sums = [0.0, *accumulate(costs)]
    limit = _smallest_limit(sums, stages)
    best: list[float] = [0.0] + [float("inf")] * len(costs)  # of the layers before i in the stages so far
    choice: list[list[int]] = []
    for stage in range(1, stages + 1):
        new, chosen = [float("inf")] * len(best), [0] * len(best)
        for end in range(stage, len(costs) - (stages - stage) + 1):
            for start in range(end - 1, stage - 2, -1):
                load = sums[end] - sums[start]
                if load > limit:
                    break
                if best[start] + load * load < new[end]:
                    new[end], chosen[end] = best[start] + load * load, start
        best = new
        choice.append(chosen)
    bounds = [len(costs)]
    for chosen in reversed(choice):
        bounds.append(chosen[bounds[-1]])
    return tuple(reversed(bounds))


def stage_costs(costs: Sequence[float], bounds: Sequence[int]) -> tuple[float, ...]:
    """The sum of each stage's layers."""
    return tuple(sum(costs[start:end]) for start, end in pairwise(bounds))


def equal_split(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds as in `split_layers` with equally many layers a stage, the first ones taking what is left over."""
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"{plural(layers, 'layer')} cannot be split into {plural(stages, 'stage')}; take 1 … {layers}"
        )
    each, more = divmod(layers, stages)
    return tuple(stage * each + min(stage, more) for stage in range(stages + 1))


def _smallest_limit(sums: Sequence[float], stages: int) -> float:
    """The heaviest stage of the best split: one of the sums of neighbouring layers, found by bisection."""
    candidates = sorted({end - start for i, start in enumerate(sums) for end in sums[i + 1 :]})

    def fits(limit: float) -> bool:
        needed, start = 0, 0
        while start < len(sums) - 1:
            end = start
            while end < len(sums) - 1 and sums[end + 1] - sums[start] <= limit:
                end += 1
            if end == start:
                return False
            needed, start = needed + 1, end
        return needed <= stages

    return candidates[bisect_left(candidates, True, key=fits)]
