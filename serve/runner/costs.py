"""What a step costs by the number of its rows, measured when an engine is made that guesses tokens."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.sequence import Batch, Sequence, SequenceChunk
from penjing.serve.speculate.rows import StepCosts

if TYPE_CHECKING:
    from penjing.serve.engine.engine import ModelRunner

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
CONTEXT = 256  # tokens before a step's: longer contexts make further rows cheaper, since they share its keys
WARMING = 2  # turns that make buffers and wake the team
ROUNDS = 9
LONGEST_SECONDS = 2.0
FAR = 7919  # tokens apart, a prime


def measure_costs(runner: ModelRunner, config: EngineConfig, vocab_size: int) -> StepCosts:
    """Run steps of one sequence, in turns, and keep the median of each size; a second, and on a slow machine three.

    Args:
        runner: its cache must not hold anything yet.
        config: resolved.
    """
    assert config.num_blocks is not None
    assert config.max_model_len is not None
    room = min((config.num_blocks - 1) * config.block_size, config.max_model_len)
    most = max(min(config.max_num_batched_tokens, room - 1), 1)
    sizes = [rows for rows in ROWS if rows <= most]
    if len(sizes) < 2:  # a step takes one token alone: there is nothing to weigh
        return StepCosts({1: 1.0, 2: 2.0})
    before = min(CONTEXT, room - sizes[-1])
    seconds: dict[int, list[float]] = {rows: [] for rows in sizes}
    begun = time.perf_counter()
    for turn in range(WARMING + ROUNDS):
        for rows in sizes:
            started = time.perf_counter()
            runner.run(_step(before, rows, config.block_size, vocab_size))
            if turn >= WARMING:
                seconds[rows].append(time.perf_counter() - started)
        if turn >= WARMING and time.perf_counter() - begun > LONGEST_SECONDS:
            break
    return StepCosts({rows: median(each) for rows, each in seconds.items()})


def _step(before: int, rows: int, block_size: int, vocab_size: int) -> Batch:
    """A sequence whose first `before` tokens count as computed, its last one and rows − 1 guesses; tokens differ, since
    equal ones would go to the same experts."""
    tokens = [FAR * place % vocab_size for place in range(before + rows)]
    sequence = Sequence("costs", tokens[: before + 1])
    sequence.num_computed_tokens = before
    sequence.draft = tokens[before + 1 :]
    sequence.block_table = list(range(1, 1 + -(-(before + rows) // block_size)))
    return Batch([SequenceChunk(sequence, 1)], rows)
