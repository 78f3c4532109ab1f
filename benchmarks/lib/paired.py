"""Rows of runs that differ in one thing, repeated with seeds: the mean, and the change beside one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from lib.rows import Row, new_row

# Student's t at 97.5 %, by degrees of freedom.
_T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


def paired_rows(
    benchmark: str, losses: Mapping[tuple[str, int], Mapping[str, float]], seeds: int, first: str, baseline: str
) -> list[Row]:
    """`ARM/TEXT` as geometric means of perplexity, and `ARM/TEXT_change` in percent beside the arm `first`, with the
    ends of its 95 % interval over the seeds (Student's t of the paired logarithms).

    Args:
        losses: (arm, seed) → text → mean loss in nats.
        seeds: of each arm, 8 at most; with one there is no interval.
        baseline: what `first` is, in words.
    """
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in losses):
        for text in losses[first, 0]:
            mine = np.array([losses[arm, seed][text] for seed in range(seeds)])
            beside = np.array([losses[first, seed][text] for seed in range(seeds)])
            named = {} if arm == first else {"baseline": baseline, "baseline_value": math.exp(beside.mean())}
            rows.append(new_row(benchmark, f"{arm}/{text}", math.exp(mine.mean()), "perplexity", runs=seeds, **named))
            if arm != first:
                middle = float((mine - beside).mean())
                wide = _T_975[seeds - 1] * float((mine - beside).std(ddof=1)) / math.sqrt(seeds) if seeds > 1 else 0.0
                ends = [("", middle)] + ([("_low", middle - wide), ("_high", middle + wide)] if wide else [])
                rows += [
                    new_row(benchmark, f"{arm}/{text}_change{end}", 100 * math.expm1(each), "%", runs=seeds)
                    for end, each in ends
                ]
    return rows
