"""The benchmark of long contexts, on a model of a few thousand parameters."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from run_long_context import CHOOSING, Cache, count_rows, engines, share_read

from penjing.core.runtime.fused import fuse_decoder
from penjing.serve.engine.config import EngineConfig
from tests.kernels.cpu import needs_extension
from tests.serve.tiny import tiny_config, tiny_model

FEW = EngineConfig.model_validate(
    {
        "attention": "window+blocks",
        "attention_window": 16,
        "attention_sink": 0,
        "attention_budget": 32,
        "attention_full_layers": 1,
    }
)


def test_what_is_read_is_counted() -> None:
    config = tiny_config()
    assert share_read(config, FEW, 31, None) == 1.0
    # One of two layers reads all 96 keys, the other 32 of them and, by their bytes, 5 summaries.
    assert share_read(config, FEW, 95, None) == pytest.approx((96 + 32) / 192)
    assert share_read(config, FEW, 95, "float32") == pytest.approx((96 + 32 + 5 * 24 / 64) / 192)
    rows = {row.metric: row for row in count_rows(tiny_config(num_hidden_layers=4))}
    assert rows["keys_read_16384"].value == pytest.approx(0.5 + 0.5 / 8)
    assert rows["bytes_per_token_int8"].ratio is not None


def test_the_table_has_engines_that_may_be_made() -> None:
    assert engines(False) == [CHOOSING]
    assert {engine.attention_block for engine in engines(True)} == {16, 32, 64}


@needs_extension
def test_a_cache_gives_the_same_logits_in_chunks_and_at_once() -> None:
    loaded = tiny_model()
    step = fuse_decoder(loaded.model)
    assert step is not None
    ids = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []
    logits = torch.empty(0)
    for cuts in ([0, 100], [0, 48, 99, 100]):
        cache = Cache.make(loaded.config, step, "float32", FEW, 112)
        for begin, end in pairwise(cuts):
            logits = cache.run(ids[begin:end], begin, torch.tensor([end - begin - 1])).clone()
        found.append(logits)
    assert torch.equal(*found)
    full = Cache.make(loaded.config, step, "float32", EngineConfig(), 112)
    assert not torch.equal(full.run(ids, 0, torch.tensor([99])), found[0])
