"""What the engine promises a caller: how answers end, what parameters do, limits, errors that stay with their
request."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.errors import OverloadedError, RequestError, ServerError
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.engine.sequence import Batch, Sequence
from penjing.serve.sampling.choice import StepScores
from penjing.serve.sampling.params import SamplingParams
from tests.serve.engine.test_stop import cut
from tests.serve.tiny import (
    CONTEXT,
    EOS,
    VOCAB_SIZE,
    generate,
    ids_of,
    run_all,
    text_of,
    tiny_engine,
    tiny_model,
)

PROMPT = list(b"a prompt")


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return tiny_engine()


class Scripted:
    """Stands in for a runner: every sequence answers the bytes of one text. The engine around it is real."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def run(self, batch: Batch, largest: bool) -> tuple[Any, list[Any]]:
        ready = [s for s, count in batch.chunks if s.num_computed_tokens + count == s.num_tokens]
        logits_RV = torch.full((len(ready), VOCAB_SIZE), -5.0).numpy()
        for row, sequence in enumerate(ready):
            logits_RV[row, self.tokens[sequence.num_output_tokens % len(self.tokens)]] = 5.0
        return StepScores(logits_RV), ready


SCRIPTED = tiny_engine()


def scripted(tokens: list[int], **params: Any) -> list[RequestOutput]:
    SCRIPTED.runner = Scripted(tokens)  # type: ignore[assignment]
    return generate(SCRIPTED, PROMPT, temperature=0, **params)


def test_lsh_layers_are_served_with_full_attention_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    hashed = tiny_model(model_type="penjing", layer_types=["lsh_attention", "full_attention"])
    with caplog.at_level("WARNING"):
        found = tiny_engine(hashed)
        expected = tiny_engine(tiny_model())
    (record,) = caplog.records
    assert "layers 0 were trained with LSH attention; they are served with full attention" in record.getMessage()
    answers = [ids_of(generate(engine, PROMPT, max_tokens=8, temperature=0.0)) for engine in (found, expected)]
    assert answers[0] == answers[1]


def test_length_is_the_reason_after_max_tokens(engine: LLMEngine) -> None:
    outputs = generate(engine, PROMPT, max_tokens=5, ignore_eos=True)
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    assert [output.num_output_tokens for output in outputs] == [1, 2, 3, 4, 5]
    assert outputs[0].num_prompt_tokens == len(PROMPT)


def test_the_context_ends_an_answer_without_max_tokens(engine: LLMEngine) -> None:
    outputs = generate(engine, PROMPT, max_tokens=None, ignore_eos=True)
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].num_output_tokens == CONTEXT - len(PROMPT)


def test_the_end_of_text_token_stops_and_is_not_shown() -> None:
    outputs = scripted([*b"ab", EOS], max_tokens=10)
    assert (text_of(outputs), outputs[-1].finish_reason, ids_of(outputs)) == ("ab", "stop", [*b"ab", EOS])
    shown = scripted([*b"ab", EOS], max_tokens=10, skip_special_tokens=False, include_stop_str_in_output=True)
    assert text_of(shown) == "ab<|end|>"
    ignored = scripted([*b"ab", EOS], max_tokens=6, ignore_eos=True)
    assert (text_of(ignored), ignored[-1].finish_reason) == ("abab", "length")


def test_stop_token_ids_stop() -> None:
    outputs = scripted(list(b"abc"), max_tokens=10, stop_token_ids=[ord("c")])
    assert (text_of(outputs), outputs[-1].finish_reason) == ("ab", "stop")


def test_min_tokens_keeps_stop_tokens_and_stop_strings_away() -> None:
    """The most likely token is the end of text from the start; below min_tokens the next best is taken."""
    outputs = scripted([EOS], max_tokens=10, min_tokens=4)
    assert (outputs[-1].num_output_tokens, outputs[-1].finish_reason) == (5, "stop")
    assert EOS not in ids_of(outputs)[:4]
    outputs = scripted(list(b"ab"), max_tokens=10, min_tokens=5, stop=["ab"])
    assert text_of(outputs) == "abab", "the stop string that counts is the first after min_tokens"
    assert (outputs[-1].num_output_tokens, outputs[-1].finish_reason) == (6, "stop")


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("tree grows. END more", "END", "tree grows. "),
        ("盆景 is 树 art", "树", "盆景 is "),
        ("🌳🌲🌴", "🌲🌴", "🌳"),
        ("aab", "ab", "a"),
        ("abababac", "abac", "abab"),
    ],
)
def test_stop_strings_across_tokens_and_utf8_bytes(text: str, stop: str, shown: str) -> None:
    """Every token is one byte here: characters and stop strings are always divided."""
    outputs = scripted(list(text.encode()), max_tokens=200, stop=[stop])
    assert (text_of(outputs), outputs[-1].finish_reason) == (shown, "stop")
    with_stop = scripted(list(text.encode()), max_tokens=200, stop=[stop], include_stop_str_in_output=True)
    assert text_of(with_stop) == shown + stop
    assert all("\ufffd" not in output.text for output in outputs)


@given(st.text("ab é盆🌳", min_size=1, max_size=20), st.lists(st.text("ab é盆🌳", min_size=1, max_size=3), max_size=2))
def test_any_text_and_stop_strings_in_bytes(text: str, stops: list[str]) -> None:
    """The answer is the text, one byte a token, cut as the definition says."""
    tokens = list(text.encode())
    outputs = scripted(tokens, max_tokens=len(tokens), stop=stops)
    shown, stopped = cut(text, tuple(stops), include=False)
    assert (text_of(outputs), outputs[-1].finish_reason) == (shown, "stop" if stopped else "length")


def test_text_held_for_a_stop_string_comes_out_at_the_end() -> None:
    outputs = scripted(list(b"xEN"), max_tokens=3, stop=["END"])
    assert [output.text for output in outputs] == ["x", "", "EN"]


def test_an_incomplete_character_at_the_end_is_replaced() -> None:
    outputs = scripted(list("é树".encode()), max_tokens=4)
    assert [output.text for output in outputs] == ["", "é", "", "\ufffd"]


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    assert text_of(scripted([ord("a"), 257], max_tokens=4)) == "aa"
    assert text_of(scripted([ord("a"), 257], max_tokens=4, skip_special_tokens=False)) == "a<|pad|>a<|pad|>"


def test_logprobs_are_those_of_the_raw_logits(engine: LLMEngine) -> None:
    outputs = generate(engine, PROMPT, max_tokens=4, temperature=0.3, seed=1, logprobs=3, ignore_eos=True)
    ids = PROMPT + ids_of(outputs)
    with torch.inference_mode():
        expected = torch.log_softmax(tiny_model().model(torch.tensor([ids]))[0].double(), -1)
    for i, output in enumerate(outputs):
        assert output.logprobs is not None
        (logprobs,) = output.logprobs
        row = expected[len(PROMPT) + i - 1]
        assert {entry.rank for entry in logprobs.values()} >= {1, 2, 3}
        assert output.token_ids[0] == next(iter(logprobs))
        for token_id, entry in logprobs.items():
            assert math.isclose(entry.logprob, float(row[token_id]), abs_tol=1e-4)


def test_the_same_seed_gives_the_same_answer_and_another_another(engine: LLMEngine) -> None:
    first, again, other = (
        ids_of(generate(engine, PROMPT, max_tokens=20, seed=seed, ignore_eos=True)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    unseeded = {tuple(ids_of(generate(engine, PROMPT, max_tokens=20, ignore_eos=True))) for _ in range(3)}
    assert len(unseeded) == 3


def test_penalties_change_an_answer_that_repeats(engine: LLMEngine) -> None:
    plain = ids_of(generate(engine, PROMPT, max_tokens=60, temperature=0, ignore_eos=True))
    assert len(set(plain)) < 60
    for penalty in ({"repetition_penalty": 1e6}, {"presence_penalty": 2.0, "frequency_penalty": 2.0}):
        answer = ids_of(generate(engine, PROMPT, max_tokens=60, temperature=0, ignore_eos=True, **penalty))
        assert len(set(answer)) > len(set(plain))


def test_n_gives_n_answers_and_counts_each(engine: LLMEngine) -> None:
    outputs = run_all(engine, [Request("r", PROMPT, SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))])
    assert sorted(outputs) == [("r", 0), ("r", 1), ("r", 2)]
    assert all(sequence[-1].finish_reason == "length" for sequence in outputs.values())
    assert outputs["r", 1][0].num_cached_tokens == 4, "two blocks of four hold the prompt; the last token is computed"
    assert not engine.is_active("r")


def test_a_text_prompt_is_tokenized(engine: LLMEngine) -> None:
    by_text = ids_of(generate(engine, "a prompt", temperature=0))
    assert by_text == ids_of(generate(engine, PROMPT, temperature=0))


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([VOCAB_SIZE], "from 0 to 257"),
        ([-1], "from 0 to 257"),
        ([True], "integers"),
        (["a"], "integers"),
        (None, "text or a list of token ids"),
        (b"bytes", "text or a list of token ids"),
        ("\ud800", "not valid Unicode"),
        ([1] * CONTEXT, f"at most {CONTEXT - 1}"),
        ("a" * CONTEXT, f"at most {CONTEXT - 1}"),
        ("a" * 10_000_000, "10000000 bytes; the context of 256 tokens holds at most"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_rule(engine: LLMEngine, prompt: Any, rule: str) -> None:
    with pytest.raises(RequestError, match=rule):
        engine.add(Request("r", prompt))
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids .* from 0 to 257"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias .* from 0 to 257"),
        ({"min_tokens": CONTEXT, "max_tokens": None}, "min_tokens must be at most 248"),
    ],
)
def test_parameters_that_do_not_fit_the_model_are_refused(engine: LLMEngine, params: dict, rule: str) -> None:
    with pytest.raises(RequestError, match=rule):
        engine.add(Request("r", PROMPT, SamplingParams(**params)))


def test_the_longest_prompt_gets_its_one_token(engine: LLMEngine) -> None:
    (output,) = generate(engine, [1] * (CONTEXT - 1), max_tokens=50, ignore_eos=True)
    assert output.finish_reason == "length"


def test_an_id_in_use_is_refused() -> None:
    engine = tiny_engine()
    engine.add(Request("r", PROMPT))
    with pytest.raises(RequestError, match="in use"):
        engine.add(Request("r", PROMPT))


def test_limits_on_waiting_requests_and_tokens_say_when_to_retry() -> None:
    engine = tiny_engine(max_waiting_requests=2, max_num_sequences=1)
    engine.add(Request("a", PROMPT))
    engine.add(Request("b", PROMPT))
    with pytest.raises(OverloadedError, match=r"2 sequences wait and max_waiting_requests=2; retry in \d+ s"):
        engine.add(Request("c", PROMPT))
    engine.step()
    engine.add(Request("c", PROMPT))
    engine = tiny_engine(max_waiting_tokens=20)
    engine.add(Request("a", PROMPT * 8))
    with pytest.raises(OverloadedError, match=r"64 tokens wait and max_waiting_tokens=20"):
        engine.add(Request("b", PROMPT))
    engine.step()
    engine.add(Request("b", PROMPT * 8))  # nothing waits: even a prompt above the limit is taken


def test_abort_frees_blocks_at_once_wherever_the_request_is() -> None:
    engine = tiny_engine(max_num_sequences=2, max_num_batched_tokens=8)
    for name in ("running", "in-chunks", "waiting"):
        prompt = PROMPT * (5 if name == "in-chunks" else 1)
        engine.add(Request(name, prompt, SamplingParams(n=2 if name == "waiting" else 1, ignore_eos=True)))
    engine.step()
    engine.step()
    for name, count in (("in-chunks", 1), ("waiting", 2), ("running", 1)):
        outputs = engine.abort(name)
        assert [output.finish_reason for output in outputs] == ["abort"] * count
        assert engine.broken_invariants() == []
    assert engine.abort("running") == []
    assert engine.stats().num_blocks_used == 0
    assert not engine.has_work()
    assert engine.stats().request_success["abort"] == 4


def test_logits_that_are_not_numbers_end_their_request_alone() -> None:
    loaded = tiny_model()
    with torch.no_grad():
        loaded.model.model.embed_tokens.weight[200] = float("nan")
    engine = tiny_engine(loaded)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={200: -100})
    expected = ids_of(run_all(engine, [Request("r", PROMPT, params)])["r", 0])
    bad = [200, *PROMPT]
    outputs = run_all(engine, [Request("bad", bad, params), Request("ok", PROMPT, params)])
    assert outputs["bad", 0][-1].finish_reason == "error"
    assert "not finite" in str(outputs["bad", 0][-1].error)
    assert ids_of(outputs["ok", 0]) == expected
    assert engine.stats().num_blocks_used == 0
    assert engine.scheduler.blocks.find_prefix(Sequence("again", bad)) == [], "its keys and values are not shared"


def test_a_batch_that_fails_costs_only_the_request_at_fault() -> None:
    engine = tiny_engine()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = ids_of(run_all(engine, [Request("r", PROMPT, params)])["r", 0])
    run = engine.runner.run

    def failing(batch: Batch, largest: bool) -> Any:
        if any(chunk.sequence.request_id == "bad" for chunk in batch.chunks):
            raise ValueError("boom")
        return run(batch, largest)

    engine.runner.run = failing  # type: ignore[method-assign]
    outputs = run_all(engine, [Request(name, PROMPT, params) for name in ("first", "bad", "last")])
    assert "boom" in str(outputs["bad", 0][-1].error)
    assert ids_of(outputs["first", 0]) == ids_of(outputs["last", 0]) == expected


def test_a_failure_in_sampling_costs_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise ValueError("no such token")

    for module in ("choice", "sampler"):  # the kernels' way and numpy's
        monkeypatch.setattr(f"penjing.serve.sampling.{module}.uniform", failing)
    engine = tiny_engine()
    outputs = run_all(
        engine, [Request("bad", PROMPT), Request("ok", PROMPT, SamplingParams(temperature=0, ignore_eos=True))]
    )
    assert outputs["bad", 0][-1].finish_reason == "error"
    assert outputs["ok", 0][-1].finish_reason == "length"


def test_a_defect_resets_the_scheduler_with_blocks_held_and_forks_waiting() -> None:
    engine = tiny_engine(max_num_batched_tokens=4, max_num_sequences=2)
    requests = [Request(name, PROMPT, SamplingParams(n=3, ignore_eos=True)) for name in "ab"]
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.stats().num_blocks_used > 0
    outputs = engine.abort_all(ServerError("a defect"))
    assert sorted((output.request_id, output.index) for output in outputs) == [(n, i) for n in "ab" for i in range(3)]
    assert engine.broken_invariants() == []
    assert (engine.stats().num_blocks_used, engine.stats().num_requests_waiting) == (0, 0)
    assert len(run_all(engine, requests)) == 6


def test_statistics_count_tokens_steps_and_reasons() -> None:
    engine = tiny_engine()
    run_all(engine, [Request(str(i), PROMPT, SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(3)])
    stats, samples = engine.stats(), engine.samples.take()
    assert (stats.prompt_tokens, stats.generation_tokens) == (3 * len(PROMPT), 12)
    assert stats.request_success == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage_perc) == (0, 0, 0.0)
    assert len(samples["time_to_first_token_seconds"]) == 3
    assert len(samples["time_per_output_token_seconds"]) == 9
    assert sum(samples["iteration_tokens_total"]) == 3 * len(PROMPT) + 9
    assert engine.samples.take()["iteration_tokens_total"] == []


def test_answers_are_the_same_with_numpy_and_when_all_logits_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        Request("greedy", PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
        *(
            Request(f"top-{top_k}", PROMPT, SamplingParams(top_k=top_k, top_p=0.9, seed=top_k, max_tokens=20))
            for top_k in (0, 1, 3, 64)
        ),
    ]

    def answers(requests: list[Request]) -> dict[tuple[str, int], list[int]]:
        engine = tiny_engine(tiny_model(int8=True))
        return {name: ids_of(outputs) for name, outputs in run_all(engine, requests).items()}

    alone = answers(requests[:1])
    together = answers(requests)
    assert together["greedy", 0] == alone["greedy", 0]
    monkeypatch.setattr("penjing.serve.sampling.choice.cpu_extension", lambda: None)
    assert answers(requests) == together
