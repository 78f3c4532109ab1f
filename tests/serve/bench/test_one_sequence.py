"""One sequence in a paged cache, on a model of a few thousand parameters."""

from __future__ import annotations

from itertools import pairwise

import torch

from penjing.core.runtime.fused import fuse_decoder
from penjing.serve.bench.one_sequence import OneSequence
from penjing.serve.engine.config import EngineConfig
from tests.kernels.cpu import needs_extension
from tests.serve.tiny import tiny_model

FEW = EngineConfig.model_validate(
    {
        "attention": "window+blocks",
        "attention_window": 16,
        "attention_sink": 0,
        "attention_budget": 32,
        "attention_full_layers": 1,
    }
)


@needs_extension
def test_a_cache_gives_the_same_logits_in_chunks_and_at_once() -> None:
    loaded = tiny_model()
    step = fuse_decoder(loaded.model)
    assert step is not None
    ids = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []
    logits = torch.empty(0)
    for cuts in ([0, 100], [0, 48, 99, 100]):
        cache = OneSequence.make(loaded.config, step, "float32", FEW, 112)
        for begin, end in pairwise(cuts):
            logits = cache.run(ids[begin:end], begin, torch.tensor([end - begin - 1])).clone()
        found.append(logits)
    assert torch.equal(*found)
    full = OneSequence.make(loaded.config, step, "float32", EngineConfig(), 112)
    assert not torch.equal(full.run(ids, 0, torch.tensor([99])), found[0])
