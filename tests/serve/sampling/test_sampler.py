"""The sampler against transformers' logits processors and warpers, and its draws against the distribution."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sampling.sampler import (
    TokenCounts,
    apply_penalties,
    draw,
    exact,
    exp_unfused,
    keep_top,
    sample,
    top_logprobs,
    uniform,
)

VOCAB = 300


def logits_of(seed: int, size: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)


def transformers_probabilities(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if 0 < params.top_k < len(logits_V):
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    empty: Any = torch.zeros(1, 1, dtype=torch.long)
    scores: Any = torch.from_numpy(logits_V.astype(np.float64))[None]
    return torch.softmax(warpers(empty, scores), -1)[0].numpy()


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    st.sampled_from([0, 1, 5, 50, VOCAB]),
    st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3]),
)
def test_filters_keep_what_transformers_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits_V = logits_of(seed)
    expected = transformers_probabilities(logits_V, params)
    ids, weights = keep_top(logits_V, params)
    assert set(ids) == set(np.flatnonzero(expected))
    np.testing.assert_allclose(weights / weights.sum(), expected[ids], rtol=1e-5)


def test_a_wide_nucleus_keeps_what_transformers_keeps() -> None:
    """Wider than the 512 weights that are sorted first."""
    params = SamplingParams(top_p=0.95)
    logits_V = logits_of(1, size=5000, scale=0.5)
    ids, _ = keep_top(logits_V, params)
    assert len(ids) > 512
    assert set(ids) == set(np.flatnonzero(transformers_probabilities(logits_V, params)))


@given(st.integers(0, 2**32), st.sampled_from([0.7, 1.3]), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
def test_repetition_penalty_equals_transformers(seed: int, penalty: float, prompt: list[int]) -> None:
    logits_V = logits_of(seed)
    ids: Any = torch.tensor([prompt])
    scores: Any = torch.from_numpy(logits_V.copy())[None]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)[0].numpy()
    apply_penalties(logits_V, SamplingParams(repetition_penalty=penalty), TokenCounts(prompt))
    np.testing.assert_allclose(logits_V, expected, rtol=1e-6)


def test_presence_and_frequency_follow_the_definition() -> None:
    """OpenAI's documented formula: logit − count·frequency − (count > 0)·presence, over the output alone."""
    logits_V, counts = logits_of(3), TokenCounts([1, 2, 3])
    for token in [5, 9, 5, 5]:
        counts.add(token)
    expected = logits_V.copy()
    expected[5] -= 3 * 0.5 + 1.25
    expected[9] -= 1 * 0.5 + 1.25
    apply_penalties(logits_V, SamplingParams(frequency_penalty=0.5, presence_penalty=1.25), counts)
    np.testing.assert_allclose(logits_V, expected, rtol=1e-6)


def test_bias_and_forbidden_tokens_decide_a_greedy_choice() -> None:
    logits_V = logits_of(4)
    best = int(logits_V.argmax())
    params = SamplingParams(temperature=0, logit_bias={7: 100.0})
    assert sample(logits_V, params, 0.0, None, None) == 7
    runner_up = int(np.argsort(logits_V)[-2])
    assert sample(logits_V, SamplingParams(temperature=0), 0.0, None, np.array([best])) == runner_up
    assert int(logits_V.argmax()) == best, "the row is left as it was"


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 0.0])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits_V = logits_of(5)
    assert sample(logits_V, SamplingParams(temperature=temperature), 0.9, None, None) == int(logits_V.argmax())


def test_draws_follow_the_distribution() -> None:
    """χ² over 20 tokens at 20 000 draws: 43.8 is exceeded by a true sampler once in 1000 seeds, and this seed is
    fixed."""
    logits_V = logits_of(6, size=20, scale=1.0)
    probabilities = transformers_probabilities(logits_V, SamplingParams())
    draws = [sample(logits_V, SamplingParams(), uniform(11, 0, position), None, None) for position in range(20_000)]
    counts = np.bincount(draws, minlength=20)
    expected = probabilities * len(draws)
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0]), min_size=1, max_size=700), st.floats(0, 1, exclude_max=True))
def test_draw_takes_the_token_where_the_running_sum_passes(weights: list[float], number: float) -> None:
    array = np.array([*weights, 1.0], dtype=np.float32)
    token = draw(np.arange(len(array)) + 10, array, number) - 10
    assert array[token] > 0
    cumulative = np.cumsum(array, dtype=np.float64)
    tolerance = 1e-9 * cumulative[-1]
    assert cumulative[token] >= number * cumulative[-1] - tolerance
    assert token == 0 or cumulative[token - 1] <= number * cumulative[-1] + tolerance


def test_uniform_numbers_differ_by_seed_index_and_position_and_are_even() -> None:
    numbers = [uniform(seed, index, position) for seed in (-1, 0, 7) for index in range(4) for position in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    histogram = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((histogram - 600) ** 2 / 600).sum() < 27.9  # χ² with 9 degrees of freedom at 1 in 1000


def test_powers_and_exact_sums() -> None:
    x = -np.concatenate([np.linspace(0, 87, 20_001), np.geomspace(1e-30, 1, 1000)]).astype(np.float32)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(exp_unfused(x) / expected - 1)).max() < 1.5e-7  # half a unit in the last place is 6e-8
    one, below, never = exp_unfused(np.array([0, -200, -np.inf], np.float32))
    assert one == 1
    assert below == never == exp_unfused(np.array([-87], np.float32))[0]
    weights = exact(exp_unfused(x))
    assert {weights.sum(), weights[::-1].sum(), sum(weights.tolist()), np.sort(weights).sum()} == {weights.sum()}


@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(0, VOCAB - 1))
def test_logprobs_equal_log_softmax(seed: int, count: int, chosen: int) -> None:
    logits_V = np.round(logits_of(seed))  # rounded: ties
    expected = torch.log_softmax(torch.from_numpy(logits_V.astype(np.float64)), -1).numpy()
    order = sorted(range(VOCAB), key=lambda token: (-logits_V[token], token))
    rows = top_logprobs(logits_V, chosen, count)
    best = sorted(logits_V, reverse=True)[:count]
    assert [float(logits_V[token]) for token, _, _ in rows[:count]] == [float(value) for value in best]
    assert chosen in [token for token, _, _ in rows]
    assert len(rows) in (count, count + 1)
    for token, logprob, rank in rows:
        assert math.isclose(logprob, expected[token], rel_tol=1e-9)
        assert logits_V[order[rank - 1]] == logits_V[token]


extremes = st.sampled_from([1e-300, 1e-45, 1e-10, 0.5, 1.0, 2.0, 1e10, 1e38, 1e300])


@given(
    st.integers(0, 2**32),
    st.sampled_from([1e-30, 1.0, 1e4, 1e30]),
    st.sampled_from([0.0, 1e-5, 1e-300, 0.5, 1e30, 1e300]),
    extremes,
    st.sampled_from([1e-300, 0.5, 1.0]),
    st.sampled_from([0, 1, 2, VOCAB, 10**9]),
    st.sampled_from([0.0, 1e-300, 1.0]),
)
def test_extreme_parameters_give_a_token(
    seed: int, scale: float, temperature: float, penalty: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(
        temperature=temperature, repetition_penalty=penalty, top_p=top_p, top_k=top_k, min_p=min_p,
        frequency_penalty=2.0, presence_penalty=-2.0, logit_bias={3: 100.0, 4: -100.0},
    )  # fmt: skip
    counts = TokenCounts([1, 2, 3])
    counts.add(5)
    token = sample(logits_of(seed, scale=scale), params, uniform(seed, 0, 0), counts, np.array([7, 8]))
    assert 0 <= token < VOCAB
    assert token not in (7, 8)
