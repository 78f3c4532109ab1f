"""What a request gets is bit-equal whatever happens around it: batches, chunks, cache hits, preemption.

Every test here takes ``loaded``, whose settings hold as long as this file's tests run: one that does not take it would
run under those of whichever path came before.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from penjing.core.checkpoint.load import LoadedModel
from penjing.serve.engine.request import Request
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import CONTEXT, CONVOLUTIONS, DEFAULTS, ids_of, run_all, tiny_engine, tiny_model

pytestmark = pytest.mark.xdist_group("determinism")  # what all share is made once
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 5, "repetition_penalty": 1.2}

Answers = dict[str, list[tuple[int, Any]]]


PATHS = [
    "fp32",
    "int8",
    "window",
    "fp32-torch",
    "int8-torch",
    "kv-int8",
    "kv-int8-window",
    "kv-int8-torch",
    "kv-float16-window",
    "kv-bfloat16-window",
    "conv",
    "conv-torch",
    "conv-window",
    "kv-float16-int8-conv",
]


@pytest.fixture(scope="module", params=PATHS)
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """A model for each path through the runner: one fused call where the C++ extension is there, and torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param.endswith("-torch"):
            patch.setattr("penjing.serve.runner.runner.fuse_decoder", lambda model: None)
        if request.param.startswith("kv-"):
            patch.setitem(DEFAULTS, "kv_dtype", request.param.split("-")[1])
        window = 12 if request.param.endswith("window") else None
        changes = CONVOLUTIONS if "conv" in request.param else {}
        if window is not None and changes:
            changes = changes | {"layer_types": ("short_conv", "sliding_attention") * 2, "conv_taps": 14}
        yield tiny_model(int8="int8" in request.param.removeprefix("kv-int8"), sliding_window=window, **changes)


def requests_of() -> list[Request]:
    """32 requests of 2 to 48 prompt tokens, some with a common beginning; every second one is sampled."""
    random = Random(0)
    shared = [random.randrange(256) for _ in range(30)]
    requests = []
    for i in range(32):
        prompt = shared[: random.randrange(1, 30)] + [random.randrange(256) for _ in range(random.randrange(1, 20))]
        params = SAMPLED if i % 2 else GREEDY
        sampling = SamplingParams(max_tokens=4 + i % 10, ignore_eos=True, logprobs=1, **params)
        requests.append(Request(f"r{i}", prompt, sampling))
    return requests


def answers(engine: Any, requests: list[Request]) -> Answers:
    """Tokens with their logprobs, which are exact functions of the logits: equal floats are equal bits."""
    outputs = run_all(engine, requests)
    return {
        request_id: [
            (token_id, logprobs)
            for output in sequence
            for token_id, logprobs in zip(output.token_ids, output.logprobs or [], strict=True)
        ]
        for (request_id, _), sequence in outputs.items()
    }


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> Answers:
    """Each request on an engine that runs nothing else and caches nothing."""
    engine = tiny_engine(loaded, enable_prefix_caching=False, max_num_batched_tokens=CONTEXT)
    merged: Answers = {}
    for request in requests_of():
        merged |= answers(engine, [request])
    return merged


def test_a_batch_of_32(loaded: LoadedModel, alone: Answers) -> None:
    engine = tiny_engine(loaded, num_blocks=1000, max_num_batched_tokens=2000)
    assert answers(engine, requests_of()) == alone
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("budget", [1, 5, 32])
def test_chunks_of_any_size(loaded: LoadedModel, alone: Answers, budget: int) -> None:
    engine = tiny_engine(loaded, max_num_batched_tokens=budget, max_num_sequences=min(budget, 6))
    requests = requests_of()[:: 3 if budget == 1 else 1]  # a step a token takes long
    assert answers(engine, requests) == {request.request_id: alone[request.request_id] for request in requests}


def test_cache_hits(loaded: LoadedModel, alone: Answers) -> None:
    engine = tiny_engine(loaded, num_blocks=1000)
    answers(engine, requests_of())
    before = engine.stats().prefix_cache_hits
    assert answers(engine, requests_of()) == alone
    prompt_tokens = sum(len(request.prompt) for request in requests_of())
    assert engine.stats().prefix_cache_hits - before > prompt_tokens / 2


@pytest.mark.parametrize("caching", [True, False])
def test_preemption(loaded: LoadedModel, alone: Answers, caching: bool) -> None:
    settings = {"max_model_len": 80, "watermark": 0.0, "max_num_batched_tokens": 32, "enable_prefix_caching": caching}
    # With a window of 12 tokens a sequence holds few blocks for long.
    num_blocks = 21 if loaded.config.sliding_window is None else 14
    engine = tiny_engine(loaded, num_blocks=num_blocks, **settings)
    assert answers(engine, requests_of()) == alone
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("block_size", [1, 64])
def test_block_sizes(loaded: LoadedModel, alone: Answers, block_size: int) -> None:
    engine = tiny_engine(loaded, block_size=block_size, num_blocks=2400 // block_size)
    assert answers(engine, requests_of()) == alone


def test_forks_sample_what_separate_requests_would(loaded: LoadedModel) -> None:
    """n sequences share prompt blocks and differ in their draws; each is the same with and without a crowd."""
    prompt = list(range(30))
    request = Request("n", prompt, SamplingParams(n=4, seed=3, max_tokens=10, ignore_eos=True))
    quiet = run_all(tiny_engine(loaded, enable_prefix_caching=False), [request])
    crowd = run_all(tiny_engine(loaded), [*requests_of(), request])
    for index in range(4):
        assert ids_of(quiet["n", index]) == ids_of(crowd["n", index])
    assert len({tuple(ids_of(outputs)) for outputs in quiet.values()}) == 4
