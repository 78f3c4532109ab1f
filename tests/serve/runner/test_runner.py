"""The runner's input buffers, which steps change only where they must."""

from __future__ import annotations

import numpy as np
import pytest

from penjing.serve.engine.blocks import BlockManager
from penjing.serve.engine.sequence import Batch, Sequence, SequenceChunk
from penjing.serve.runner.runner import Runner
from tests.serve.tiny import tiny_model


@pytest.mark.parametrize("fused", [True, False])
def test_a_sequence_that_comes_back_with_other_blocks_reads_those(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In between, another sequence of the same batch rows has overwritten the blocks it had."""
    if not fused:
        monkeypatch.setattr("penjing.serve.runner.runner.fuse_decoder", lambda model: None)
    runner = Runner(tiny_model().model, 20, block_size=4, max_tokens=64, max_sequences=2, max_model_len=64)
    blocks = BlockManager(20, 4)
    steady, moving = Sequence("steady", list(range(30))), Sequence("moving", list(range(50, 62)))

    def run(*chunks: tuple[Sequence, int]) -> np.ndarray:
        for sequence, num_tokens in chunks:
            assert blocks.grow(sequence, sequence.num_computed_tokens + num_tokens)
        scores, ready = runner.run(Batch([SequenceChunk(*chunk) for chunk in chunks], sum(n for _, n in chunks)))
        assert ready[-1:] == [moving] or not ready
        for sequence, num_tokens in chunks:
            sequence.num_computed_tokens += num_tokens
        assert scores.logits_RV is not None
        return scores.logits_RV.copy()

    expected = run((steady, 4), (moving, 12))
    table = list(moving.block_table)
    blocks.release(moving)
    run((steady, 20))
    assert set(table) <= set(steady.block_table)
    again = run((steady, 1), (moving, 12))
    assert np.array_equal(again, expected)
    assert not set(table) & set(moving.block_table)


def test_logits_are_given_for_finished_chunks_alone() -> None:
    runner = Runner(tiny_model().model, 20, block_size=4, max_tokens=64, max_sequences=3, max_model_len=64)
    blocks = BlockManager(20, 4)
    sequences = [Sequence(str(i), list(range(10))) for i in range(3)]
    for sequence in sequences:
        assert blocks.grow(sequence, 10)
    (logits_RV, *_), ready = runner.run(
        Batch([SequenceChunk(s, n) for s, n in zip(sequences, (10, 4, 10), strict=True)], 24)
    )
    assert ready == [sequences[0], sequences[2]]
    assert logits_RV is not None
    assert logits_RV.shape == (2, 258)
    assert np.array_equal(logits_RV[0], logits_RV[1])
