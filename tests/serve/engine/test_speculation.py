"""Guessed tokens change nothing that a request gets, whatever is guessed and whatever happens around it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from penjing.core.checkpoint.load import LoadedModel
from penjing.core.errors import RequestError
from penjing.serve.engine import speculation
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.engine.sequence import Batch
from penjing.serve.engine.speculation import MOST_GUESSES
from penjing.serve.runner.costs import measure_costs
from penjing.serve.sampling.constraint import Constraint
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.speculate.drafter import FORCED, Draft
from penjing.serve.speculate.rows import StepCosts
from penjing.serve.speculate.told import PIECE
from tests.serve.tiny import (
    CONVOLUTIONS,
    DEFAULTS,
    VOCAB_SIZE,
    generate,
    ids_of,
    run_all,
    text_of,
    tiny_engine,
    tiny_model,
)

pytestmark = pytest.mark.xdist_group("speculation")  # what all share is made once
PATHS = ["fp32", "int8", "window", "fp32-torch", "kv-int8", "key-blocks", "conv", "conv-torch"]

KEY_BLOCKS: dict[str, Any] = {
    "attention": "window+blocks",
    "attention_window": 16,
    "attention_sink": 0,
    "attention_budget": 32,
    "attention_full_layers": 0,
    "block_size": 16,
}


PLAIN = dict(DEFAULTS)
CHEAP = StepCosts({1: 1.01, 64: 1.64})


@pytest.fixture(autouse=True)
def plain_without_a_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last path's settings stay until the module ends; tests of no path have none of them."""
    if "loaded" not in request.fixturenames:
        for name in [name for name in DEFAULTS if name not in PLAIN]:
            monkeypatch.delitem(DEFAULTS, name)
        for name, value in PLAIN.items():
            monkeypatch.setitem(DEFAULTS, name, value)


@pytest.fixture(scope="module", params=PATHS)
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param.endswith("-torch"):
            patch.setattr("penjing.serve.runner.runner.fuse_decoder", lambda model: None)
        if request.param.startswith("kv-int8"):
            patch.setitem(DEFAULTS, "kv_dtype", "int8")
        if request.param == "key-blocks":
            for name, value in KEY_BLOCKS.items():
                patch.setitem(DEFAULTS, name, value)
        window = 12 if request.param == "window" else None
        changes = CONVOLUTIONS if "conv" in request.param else {}
        yield tiny_model(int8=request.param == "int8", sliding_window=window, **changes)


class Seer:
    """Knows the answers and is wrong now and then; what it does not know it makes up."""

    texts: list[list[int]]
    random: Random

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def draft(self, most: int) -> Draft:
        random, ids = Seer.random, self._token_ids
        count = random.randint(0, max(most, 0))
        full = next((text for text in Seer.texts if text[: len(ids)] == ids), ids)
        right = full[len(ids) : len(ids) + count]
        right += [random.randrange(VOCAB_SIZE) for _ in range(count - len(right))]
        guessed = [token if random.random() < 0.8 else random.randrange(VOCAB_SIZE) for token in right]
        return Draft(guessed, [FORCED] * count)


def requests_of(random: Random, count: int) -> list[Request]:
    """Requests of all kinds that change how a token is chosen or when an answer ends."""
    shared = [random.randrange(256) for _ in range(24)]
    requests = []
    for number in range(count):
        prompt = shared[: random.randrange(1, 24)] + [random.randrange(256) for _ in range(random.randrange(1, 9))]
        chosen: dict[str, Any] = {
            "temperature": random.choice([0.0, 0.0, 0.7, 1.0]),
            "top_p": random.choice([1.0, 0.9]),
            "top_k": random.choice([0, 0, 5]),
            "repetition_penalty": random.choice([1.0, 1.0, 1.3]),
            "presence_penalty": random.choice([0.0, 0.0, 0.5]),
            "frequency_penalty": random.choice([0.0, 0.0, 0.4]),
            "logprobs": random.choice([None, None, 0, 2]),
            "prompt_logprobs": random.choice([None, None, None, 1]),
            "n": random.choice([1, 1, 1, 3]),
            "stop": random.choice([[], [], [chr(random.randrange(97, 123))], ["e", "qu"]]),
            "stop_token_ids": random.choice([[], [], [random.randrange(256) for _ in range(8)]]),
            "min_tokens": random.choice([0, 0, 5]),
            "ignore_eos": random.choice([True, False]),
            "max_tokens": random.randrange(5, 30),
            "seed": number,
        }
        requests.append(Request(f"r{number}", prompt, SamplingParams.from_json(chosen)))
    return requests


def answers_of(engine: LLMEngine, requests: list[Request]) -> dict[Any, Any]:
    """All that a caller sees of each sequence, apart from how it is cut into outputs."""
    found: dict[Any, Any] = {}
    for key, outputs in run_all(engine, requests).items():
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert [output.num_output_tokens for output in outputs] == list(np.cumsum([len(o.token_ids) for o in outputs]))
        found[key] = (
            ids_of(outputs),
            text_of(outputs),
            [scores for output in outputs for scores in output.logprobs or []],
            [output.prompt_logprobs for output in outputs if output.prompt_logprobs],
            outputs[-1].finish_reason,
            outputs[-1].error,
        )
    assert engine.stats().num_blocks_used == 0
    return found


def all_rows(chances: list[list[float]], *_: object) -> list[int]:
    return [len(row) for row in chances]


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_give_what_they_give_without_guesses(
    loaded: LoadedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks, small budgets, forks, stops, penalties, scores and cache hits: 3 × 5 × 30 requests."""
    random = Random(seed)
    requests = requests_of(random, 30)
    expected = answers_of(tiny_engine(loaded, num_blocks=1000), requests)
    monkeypatch.setattr(speculation, "share_rows", all_rows)
    monkeypatch.setitem(speculation.DRAFTERS, "lookup", Seer)
    prompts = {request.request_id: request.prompt for request in requests}
    Seer.texts = [[*map(int, prompts[name]), *ids] for (name, _), (ids, *_) in expected.items()]
    Seer.random = random
    engine = tiny_engine(
        loaded,
        speculate="lookup",
        num_blocks=random.choice([22, 30, 200]),
        max_model_len=80,
        watermark=0.0,
        max_num_sequences=random.choice([3, 8]),
        max_num_batched_tokens=random.choice([8, 24, 64]),
        enable_prefix_caching=random.choice([True, True, False]),
    )
    assert engine.speculation is not None
    engine.speculation.costs = CHEAP
    for _ in range(2):  # the second time prefixes are found
        assert answers_of(engine, requests) == expected
    stats = engine.stats()
    assert 100 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens


def test_lookup_checks_several_tokens_a_step_where_the_answer_repeats_itself(loaded: LoadedModel) -> None:
    plain, engine = tiny_engine(loaded), tiny_engine(loaded, speculate="lookup")
    assert engine.speculation is not None
    engine.speculation.costs = CHEAP
    params = {
        "temperature": 0.0,
        "max_tokens": 120,
        "ignore_eos": True,
        "logprobs": 1,
        "logit_bias": {8: 40.0, 9: 40.0},
    }
    expected, found = (generate(each, [5, 6, 7], **params) for each in (plain, engine))
    assert ids_of(found) == ids_of(expected)
    assert [o.logprobs for o in found] == [o.logprobs for o in expected]
    stats = engine.stats()
    assert stats.generation_tokens == 120
    assert stats.num_steps + stats.spec_decode_num_accepted_tokens == plain.stats().num_steps
    assert stats.spec_decode_num_accepted_tokens > 10


@pytest.mark.parametrize("speculate", ["forced", "lookup"])
def test_forced_tokens_of_a_form_are_checked_in_one_step(speculate: str) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"type": "boolean"}, "another_name": {"enum": ["some long text"]}},
        "required": ["a_long_name_of_a_property", "another_name"],
        "additionalProperties": False,
    }
    params = {"guided": {"kind": "json_schema", "value": schema}, "max_tokens": 200}
    loaded = tiny_model()
    plain, engine = tiny_engine(loaded, speculate="off"), tiny_engine(loaded, speculate=speculate)
    assert engine.speculation is not None
    if speculate == "lookup":
        engine.speculation.costs = CHEAP
    for choice in ({"temperature": 0.0}, {"seed": 3}, {"seed": 4, "n": 2, "logprobs": 2}):
        sampling = SamplingParams.from_json(params | choice)
        expected, found = (answers_of(each, [Request("r", [1, 2], sampling)]) for each in (plain, engine))
        assert found == expected
        assert all(finish == "stop" for *_, finish, _ in found.values())
    stats = engine.stats()
    assert stats.spec_decode_num_accepted_tokens > 0.6 * stats.generation_tokens
    assert stats.num_steps < 0.6 * plain.stats().num_steps


def test_by_default_only_what_a_form_forces_is_guessed(loaded: LoadedModel) -> None:
    engine = tiny_engine(loaded)
    generate(engine, [5, 6, 7], temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={8: 40.0, 9: 40.0})
    assert engine.stats().spec_decode_num_draft_tokens == 0
    assert tiny_engine(loaded, speculate="off").speculation is None


def always_guessing(monkeypatch: pytest.MonkeyPatch, guessed: list[int], **settings: Any) -> LLMEngine:
    """An engine that checks the same tokens in every step."""

    class Same:
        def __init__(self, token_ids: list[int]) -> None:
            pass

        def draft(self, most: int) -> Draft:
            return Draft(guessed[:most], [FORCED] * len(guessed[:most]))

    monkeypatch.setattr(speculation, "share_rows", all_rows)
    monkeypatch.setitem(speculation.DRAFTERS, "lookup", Same)
    engine = tiny_engine(speculate="lookup", **settings)
    assert engine.speculation is not None
    engine.speculation.costs = CHEAP
    return engine


def test_guesses_neither_preempt_anyone_nor_exceed_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"num_blocks": 13, "max_num_batched_tokens": 6, "max_num_sequences": 2, "watermark": 0.0}
    settings |= {"max_model_len": 24, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    requests = [Request(name, [1, 2, 3], params) for name in "ab"]
    plain = tiny_engine(**settings)
    expected = answers_of(plain, requests)
    engine = always_guessing(monkeypatch, [1] * 16, **settings)
    run, sizes = engine.runner.run, []

    def counted(batch: Any, largest: bool) -> Any:
        sizes.append(batch.num_tokens)
        return run(batch, largest)

    engine.runner.run = counted  # type: ignore[method-assign]
    assert answers_of(engine, requests) == expected
    assert max(sizes) == 6
    assert engine.stats().num_preemptions == plain.stats().num_preemptions == 0


def test_logits_of_a_guess_that_are_not_finite_end_the_answer_only_where_it_comes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second row of each step is spoiled: with a wrong guess nobody looks at it, with a right one it counts."""
    params: dict[str, Any] = {"temperature": 0.5, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    expected = ids_of(generate(tiny_engine(), [4, 5], **params))
    for guessed, right in (([256] * 3, False), (expected[1:2], True)):
        engine = always_guessing(monkeypatch, guessed)
        run = engine.runner.run

        def spoiled(batch: Any, largest: bool, run: Any = run) -> Any:
            scores, ready = run(batch, largest)
            if len(ready) > 1:
                scores.logits_RV[1] = np.nan
            return scores, ready

        engine.runner.run = spoiled  # type: ignore[method-assign]
        outputs = generate(engine, [4, 5], **params)
        if right:
            assert (ids_of(outputs), outputs[-1].finish_reason) == (expected[:2], "error")
            assert "not finite" in str(outputs[-1].error)
        else:
            assert ids_of(outputs) == expected
        assert engine.stats().num_blocks_used == 0
        assert engine.broken_invariants() == []


def test_a_batch_that_fails_is_tried_without_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(generate(tiny_engine(), [4, 5], temperature=0.0, max_tokens=8, ignore_eos=True))
    engine = always_guessing(monkeypatch, [9, 9])
    run = engine.runner.run

    def failing(batch: Any, largest: bool) -> Any:
        if any(chunk.sequence.draft for chunk in batch.chunks):
            raise ValueError("boom")
        return run(batch, largest)

    engine.runner.run = failing  # type: ignore[method-assign]
    assert ids_of(generate(engine, [4, 5], temperature=0.0, max_tokens=8, ignore_eos=True)) == expected
    assert engine.broken_invariants() == []


def test_a_form_that_fails_behind_a_guess_ends_its_answer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    engine = tiny_engine(speculate="lookup")
    monkeypatch.setattr(speculation, "share_rows", all_rows)
    fill, calls = Constraint.fill, []

    def failing(self: Constraint) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RequestError("too complex")
        fill(self)

    monkeypatch.setattr(Constraint, "fill", failing)
    guided = {"kind": "choice", "value": ["one long text", "two short ones"]}
    outputs = run_all(
        engine,
        [
            Request("formed", [1, 2], SamplingParams.from_json({"guided": guided})),
            Request("free", [1, 2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
        ],
    )
    assert outputs["formed", 0][-1].finish_reason == "error"
    assert isinstance(outputs["formed", 0][-1].error, RequestError)
    assert "too complex" in str(outputs["formed", 0][-1].error)
    assert outputs["free", 0][-1].finish_reason == "length"
    assert engine.stats().num_blocks_used == 0


@pytest.mark.parametrize("settings", [{"num_blocks": 2, "block_size": 2}, {"max_num_batched_tokens": 1}, {}])
def test_costs_are_measured_in_any_engine(settings: dict[str, Any]) -> None:
    engine = tiny_engine(None, **{"max_num_sequences": 1, **settings})
    costs = measure_costs(engine.runner, engine.config, engine.model_config.vocab_size)
    assert costs.rows[0] == 1
    assert 0 < costs.of(1) <= costs.of(costs.most_rows)
    guessing = tiny_engine(None, speculate="lookup", max_num_sequences=1, **settings)
    generated = generate(guessing, [3], max_tokens=2, ignore_eos=True)
    assert generated[-1].finish_reason == "length"


def test_costs_are_those_of_usual_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of all turns was kept, and turns that warmed up counted."""
    now, seen = [0.0], [0]

    class Paced:
        def run(self, batch: Batch) -> None:
            (chunk,) = batch.chunks
            rows = [*chunk.sequence.token_ids[-1:], *chunk.sequence.draft]
            assert len({*rows}) == len(rows), "equal tokens would go to the same experts"
            seen[0] += batch.num_tokens == 1
            strange = {1: 9.0, 2: 9.0, 5: 0.1}.get(seen[0], 1.0)  # turns
            now[0] += 0.001 * batch.num_tokens * strange

    monkeypatch.setattr("penjing.serve.runner.costs.time.perf_counter", lambda: now[0])
    costs = measure_costs(cast(Any, Paced()), tiny_engine(None).config, 300)
    assert [costs.of(rows) for rows in (1, 2, 4)] == pytest.approx([0.001, 0.002, 0.004])


def test_an_answer_that_another_has_given_comes_in_fewer_steps() -> None:
    engine = tiny_engine(speculate="lookup")
    assert engine.speculation is not None
    engine.speculation.costs = CHEAP

    def asked(name: str) -> tuple[int, list[int]]:
        before = engine.stats().num_steps
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=PIECE - 2, ignore_eos=True)
        (found,) = run_all(engine, [Request(name, [5, 6, 7], params)]).values()
        return engine.stats().num_steps - before, ids_of(found)

    (first, ids), (again, same) = asked("first"), asked("again")
    assert same == ids
    assert again < first - 10
    engine.speculation.forget_told()
    forgotten, _ = asked("forgotten")
    assert forgotten > again + 10


def test_answers_that_ended_are_forgotten() -> None:
    engine = tiny_engine(speculate="lookup")
    run_all(engine, [Request("ended", [1, 2], SamplingParams(max_tokens=MOST_GUESSES, n=2))])
    engine.add(Request("aborted", [1, 2], SamplingParams(ignore_eos=True)))
    for _ in range(4):
        engine.step()
    engine.abort("aborted")
    assert engine.speculation is not None
    assert engine.speculation._guessing == {}
