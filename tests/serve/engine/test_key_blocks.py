"""`attention=window+blocks`: a request gets the same bits whatever happens around it; and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from penjing.core.checkpoint.load import LoadedModel
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.families.decoder import FAMILY
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.kernels.cpu import needs_extension
from tests.serve.tiny import CONTEXT, generate, ids_of, run_all, tiny_engine, tiny_model

pytestmark = needs_extension

BLOCKS: dict[str, Any] = {
    "attention": "window+blocks",
    "attention_window": 16,
    "attention_sink": 16,
    "attention_budget": 64,
    "attention_full_layers": 1,
    "block_size": 16,
}
PATHS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "kv-int8": {"kv_dtype": "int8"},
    "no-sink": {"attention_sink": 0, "attention_budget": 32, "attention_full_layers": 0},
    "last-layer-full": {"attention_full_layers": [1]},
    "blocks-of-32": {"attention_block": 32, "attention_window": 32, "attention_sink": 0, "block_size": 64},
}

Answers = dict[str, list[tuple[int, Any]]]


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BLOCKS | PATHS[request.param]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model(int8=True)


def engine_of(loaded: LoadedModel, path: dict[str, Any], **settings: Any) -> LLMEngine:
    return tiny_engine(loaded, **{"num_blocks": 400} | path | settings)


def requests() -> list[Request]:
    """12 requests of 20 to 190 prompt tokens, some with a common beginning."""
    random = Random(1)
    shared = [random.randrange(256) for _ in range(150)]
    found = []
    for i in range(12):
        prompt = shared[: random.randrange(1, 150)] + [random.randrange(256) for _ in range(random.randrange(20, 40))]
        chosen: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
        found.append(Request(f"r{i}", prompt, SamplingParams(max_tokens=8 + i, ignore_eos=True, logprobs=1, **chosen)))
    return found


def answers(engine: LLMEngine, asked: list[Request]) -> Answers:
    """Tokens with their logprobs: equal floats are equal bits."""
    return {
        request_id: [
            (token_id, logprobs)
            for output in outputs
            for token_id, logprobs in zip(output.token_ids, output.logprobs or [], strict=True)
        ]
        for (request_id, _), outputs in run_all(engine, asked).items()
    }


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel, path: dict[str, Any]) -> Answers:
    """Each request in an engine that runs nothing else and caches nothing, its prompt in one step."""
    engine = engine_of(loaded, path, enable_prefix_caching=False, max_num_batched_tokens=CONTEXT)
    merged: Answers = {}
    for request in requests():
        merged |= answers(engine, [request])
    return merged


def test_they_are_others_than_with_full_attention(loaded: LoadedModel, path: dict[str, Any], alone: Answers) -> None:
    full = answers(engine_of(loaded, path | {"attention": "full"}), requests())
    assert full != alone
    assert tiny_engine(loaded, **path).runner.key_blocks is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget", [12, 37, 1000])
def test_in_company_and_in_chunks_of_any_size(
    loaded: LoadedModel, path: dict[str, Any], alone: Answers, budget: int
) -> None:
    engine = engine_of(loaded, path, max_num_batched_tokens=budget, max_num_sequences=12)
    assert answers(engine, requests()) == alone


def test_from_the_prefix_cache(loaded: LoadedModel, path: dict[str, Any], alone: Answers) -> None:
    engine = engine_of(loaded, path)
    answers(engine, requests())
    before = engine.stats().prefix_cache_hits
    assert answers(engine, requests()) == alone
    assert engine.stats().prefix_cache_hits - before > 300


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(loaded: LoadedModel, path: dict[str, Any], alone: Answers, caching: bool) -> None:
    """What was an answer, computed token by token, is then part of a prompt."""
    settings = {"max_model_len": 224, "watermark": 0.0, "max_num_batched_tokens": 64}
    num_blocks = 1 + 256 // path["block_size"]
    engine = engine_of(loaded, path, num_blocks=num_blocks, enable_prefix_caching=caching, **settings)
    assert answers(engine, requests()) == alone
    assert engine.stats().num_preemptions > 0


def test_pages_of_any_size(loaded: LoadedModel, path: dict[str, Any], alone: Answers) -> None:
    engine = engine_of(loaded, path | {"block_size": 128}, num_blocks=60)
    assert answers(engine, requests()) == alone


def test_forks_sample_what_they_would_alone(loaded: LoadedModel, path: dict[str, Any]) -> None:
    request = Request("n", list(range(140)), SamplingParams(n=3, seed=3, max_tokens=10, ignore_eos=True))
    quiet = run_all(engine_of(loaded, path, enable_prefix_caching=False), [request])
    crowd = run_all(engine_of(loaded, path), [*requests(), request])
    for index in range(3):
        assert ids_of(quiet["n", index]) == ids_of(crowd["n", index])


def test_within_the_budget_everything_is_read(loaded: LoadedModel) -> None:
    params = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    found = [generate(engine_of(loaded, BLOCKS | {"attention": kind}), list(range(43)), **params) for kind in KINDS]
    assert [o.logprobs for o in found[0]] == [o.logprobs for o in found[1]]


KINDS = ("full", "window+blocks")


def test_summaries_count_as_memory_of_the_cache() -> None:
    for kind, share in (("auto", 1 / 32), ("int8", 12 / 192)):
        engine = tiny_engine(tiny_model(head_dim=8), **BLOCKS, num_blocks=None, kv_cache_bytes=1 << 17, kv_dtype=kind)
        pool, scale, chooses = engine.runner.cache.pool, engine.runner.cache.scale, engine.runner.key_blocks  # type: ignore[attr-defined]
        keys = pool.nbytes + (0 if scale is None else scale.nbytes)
        summaries = chooses.summary.nbytes + chooses.summary_scale.nbytes
        assert keys + summaries == engine.config.kv_cache_bytes
        # 2 × (8 + 4) bytes a block and head, in one of two layers; 16 × 2 heads of 32 or 12 bytes in both
        assert summaries / keys == pytest.approx(24 / (2 * 32 * (32 if kind == "auto" else 12)))
        assert share < 0.1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"attention_window": 512, "attention_budget": 256}, "attention_budget=256 is below attention_window=512"),
    ({"attention_window": 40}, "attention_window=40 is not a multiple of attention_block=16; take 32 or 48"),
    ({"attention_sink": 8}, "attention_sink=8 is not a multiple of attention_block=16; take 16$"),
    ({"attention_block": 64, "attention_window": 64, "attention_sink": 0, "block_size": 16}, "block_size=16"),
    ({"attention_block": 24}, "attention_block"),
    ({"attention": "window"}, "attention"),
    ({"attention_window": 0}, "attention_window"),
    ({"attention_full_layers": -1}, "attention_full_layers"),
    ({"attention_full_layers": [-1]}, "attention_full_layers"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_settings_that_contradict_each_other(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(EngineConfig, {**BLOCKS, **settings}, "--set")


EXPERTS = {"num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MISFITS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"attention_window": 512, "attention_budget": 1024}, "attention_window=512 holds the whole context of 256"),
    ({}, {"attention_budget": 256}, "attention_budget=256 holds the whole context of 256"),
    ({}, {"attention_full_layers": 2}, "the model has 2 layers"),
    ({}, {"attention_full_layers": [0, 1]}, r"attention_full_layers=\[0, 1\]: the model has 2 layers, so that none"),
    ({}, {"attention_full_layers": [1, 5]}, r"\[1, 5\]: the model has 2 layers, .* none with the number 5"),
    ({"sliding_window": 32}, {}, "layers of sliding_attention"),
    (
        {"model_type": "penjing", "moe": EXPERTS | {"shared_expert_intermediate_size": 16}},
        {},
        "narrower than an expert",
    ),
    ({"layer_types": ["full_attention", "lsh_attention"], "model_type": "penjing"}, {}, "layers of lsh_attention"),
]


@pytest.mark.parametrize(("changes", "settings", "words"), MISFITS)
def test_models_that_do_not_fit(changes: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_engine(tiny_model(**changes), **{**BLOCKS, **settings})


def test_a_model_with_experts_chooses_too() -> None:
    loaded = tiny_model(model_type="penjing", moe=EXPERTS)
    whole = engine_of(loaded, BLOCKS, enable_prefix_caching=False, max_num_batched_tokens=CONTEXT)
    alone: Answers = {}
    for request in requests():
        alone |= answers(whole, [request])
    assert answers(engine_of(loaded, BLOCKS, max_num_batched_tokens=37, max_num_sequences=12), requests()) == alone
    assert answers(engine_of(loaded, BLOCKS | {"attention": "full"}), requests()) != alone


def test_a_model_whose_layers_run_on_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penjing.serve.runner.runner.fuse_decoder", lambda model: None)
    monkeypatch.setattr("penjing.serve.runner.runner.why_not_fused", lambda model: "it is a test")
    with pytest.raises(ConfigError, match=r"C\+\+ step alone.*it is a test"):
        tiny_engine(**BLOCKS)


def test_a_folder_is_refused_before_its_weights_are_read(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(folder: Path) -> Any:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("penjing.serve.runner.load.load_model", never)
    config = EngineConfig.model_validate(BLOCKS | {"attention_full_layers": 99})
    with pytest.raises(ConfigError, match="attention_full_layers=99"):
        load_engine(tiny_checkpoint, config)
    with pytest.raises(ConfigError, match="attention_full_layers=99"):
        FAMILY.check(tiny_checkpoint, config)


def test_the_commands_take_it(make_tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    from penjing.core.cli import _run

    folder = make_tiny_checkpoint(max_position_embeddings=1024)
    chosen = [f"{key}={value}" for key, value in BLOCKS.items()]
    arguments = [part for setting in chosen for part in ("--set", setting)]
    assert _run(["generate", str(folder), "in the " * 40, "--max-tokens", "4", *arguments]) == 0
    assert _run(["generate", str(folder), "in", *arguments, "--set", "attention_budget=16"]) == 2
    assert "attention_budget=16 is below" in capsys.readouterr().err


def test_the_first_rows_of_a_cache_do_not_matter(loaded: LoadedModel) -> None:
    """Summaries that another sequence left in a page are never read."""
    engine = engine_of(loaded, BLOCKS, enable_prefix_caching=False, num_blocks=17)
    expected = answers(engine, requests()[:3])
    chooses = engine.runner.key_blocks  # type: ignore[attr-defined]
    chooses.summary.fill_(-128)
    chooses.summary_scale.fill_(torch.nan)
    assert answers(engine, requests()[:3]) == expected
