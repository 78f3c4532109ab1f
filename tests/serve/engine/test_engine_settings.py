"""What settings make of an engine: cache sizes, the context that fits, the cache's dtype, contradictions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penjing.core.errors import ConfigError
from tests.serve.tiny import CONTEXT, generate, tiny_engine, tiny_model


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"max_model_len": CONTEXT + 1}, "above the model's context of 256"),
        ({"max_model_len": 200, "num_blocks": 20}, "needs 51 KV blocks of 4 tokens, there are 20"),
        ({"num_blocks": None, "kv_cache_bytes": 1000}, "holds 0 blocks .* raise kv_cache_bytes"),
        ({"num_blocks": 10**9}, "does not fit"),
    ],
)
def test_settings_that_contradict_the_model_or_the_memory(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        tiny_engine(**settings)


def test_auto_settings_hold_what_can_run_and_shrink_the_context_to_the_cache() -> None:
    engine = tiny_engine(num_blocks=None, max_num_sequences=3)
    assert engine.config.num_blocks == 1 + 3 * CONTEXT // 4
    assert engine.max_model_len == CONTEXT
    assert tiny_engine(num_blocks=11).max_model_len == 40


def test_an_int8_cache_holds_more_tokens_in_the_same_bytes() -> None:
    budget = {"num_blocks": None, "kv_cache_bytes": 1 << 16}
    floats, int8 = tiny_engine(**budget), tiny_engine(**budget, kv_dtype="int8")
    # Heads of 8: 32 bytes against 8 and a scale of 4.
    assert floats.config.num_blocks == (1 << 16) // (2 * 2 * 2 * 4 * 32)
    assert int8.config.num_blocks == (1 << 16) // (2 * 2 * 2 * 4 * 12)
    assert int8.max_model_len > floats.max_model_len
    for engine in (floats, int8):
        pool, scale = engine.runner.cache.pool, engine.runner.cache.scale
        assert pool.nbytes + (0 if scale is None else scale.nbytes) == engine.config.kv_cache_bytes
    assert int8.runner.cache.pool.dtype == torch.int8


@pytest.mark.parametrize("fused", [True, False])
def test_an_int8_cache_answers_nearly_as_a_float_cache(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.setattr("penjing.serve.runner.runner.fuse_decoder", lambda model: None)
    params = {"temperature": 0.0, "max_tokens": 1, "logprobs": 5, "ignore_eos": True}
    answers = []
    for kind in ("float32", "int8"):
        (output,) = generate(tiny_engine(kv_dtype=kind), list(range(40)), **params)
        assert output.logprobs is not None
        answers.append((output.token_ids[0], output.logprobs[0][output.token_ids[0]].logprob))
    assert answers[0] != answers[1]
    assert answers[0] == pytest.approx(answers[1], abs=0.1)


def test_weights_of_an_activation_that_the_engine_keeps_are_not_taken() -> None:
    loaded = tiny_model(model_type="penjing", mlp_gated=False, activation="xielu")
    tiny_engine(loaded)
    with pytest.raises(ConfigError, match="take_weights does not fit a model whose activation is xielu"):
        tiny_engine(loaded, take_weights=True)


def test_heads_that_an_int8_cache_does_not_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype=int8 does not fit this model: .*head_dim=6"):
        tiny_engine(tiny_model(head_dim=6), kv_dtype="int8")
