"""Closed formulas of a pipeline's bubble with equal stages: what the papers state, for checking the simulator.

F, I, W are the seconds of one stage (a chunk of a rank's layers): forward, backward for inputs, backward for weights;
B = I + W; p ranks, v chunks each; F&B is an overlapped pair.

gpipe, 1f1b  (p − 1)(F + B)                  https://arxiv.org/abs/2104.04473, section 2.2
interleaved  (p − 1)(F + B): chunks are v times smaller, so v times less than 1f1b's (the same paper)
zb           (p − 1)(F + I − W)              ZB-H1, table 1 of https://arxiv.org/abs/2401.10241
zbv          0 if F = I = W                  section 6 there, between a rank's own first and last work
dualpipev    (p − 1)(F&B + B − 3W)           https://github.com/deepseek-ai/DualPipe (its PP is 2p here), for F = I ≥ W;
             without overlap torch runs the halves of a pair as each becomes ready, which leaves (p − 1)(F + I − W)
"""

from __future__ import annotations

from penjing.core.errors import ConfigError
from penjing.train.pipeline.schedules import Schedule


def closed_bubble(
    schedule: Schedule, ranks: int, forward: float, backward_input: float, backward_weight: float, overlap: float = 0.0
) -> float:
    """Idle seconds of a rank in one step with equal stages, enough micro-batches and free communication.

    "Enough" is: ranks or more (1f1b), a multiple of ranks (interleaved, zb), 2 × ranks or more (zbv, dualpipev).

    Args:
        forward, backward_input, backward_weight: seconds of one stage.
        overlap: share of the shorter half of a pair that is hidden (dualpipev).

    Raises:
        ConfigError: no formula is known for these times.
    """
    f, i, w = forward, backward_input, backward_weight
    if schedule in ("gpipe", "1f1b", "interleaved"):
        return (ranks - 1) * (f + i + w)
    if schedule == "zb" and w <= f and w <= i:
        return (ranks - 1) * (f + i - w)
    if schedule == "zbv" and f == i == w:
        return 0.0
    if schedule == "dualpipev" and f == i and w <= f:
        if overlap == 0:
            return (ranks - 1) * (f + i - w)
        pair = f + i + w - overlap * min(f, i + w)
        return (ranks - 1) * (pair + i - 2 * w)
    raise ConfigError(f"no closed formula for {schedule} with F={f:g}, I={i:g}, W={w:g}; simulate it")
