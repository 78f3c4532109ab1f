"""Sampling parameters: what is accepted, and that every refusal names the field and its range."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.errors import RequestError
from penjing.serve.sampling.params import SamplingParams

WRONG = [
    ("n", 0, "from 1 to 64"),
    ("n", 1.5, "from 1 to 64"),
    ("n", True, "from 1 to 64"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", "hot", "at least 0"),
    ("temperature", float("inf"), "at least 0"),
    ("temperature", "nan", "at least 0"),
    ("top_k", -2, "at least -1"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.01, "above 0 and at most 1"),
    ("min_p", 1.5, "from 0 to 1"),
    ("seed", 2**63, "64-bit"),
    ("seed", "abc", "64-bit"),
    ("repetition_penalty", 0, "above 0"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -3, "from -2 to 2"),
    ("logit_bias", {"7": 101}, "from -100 to 100"),
    ("logit_bias", {"-7": 1}, "from -100 to 100"),
    ("logit_bias", {"seven": 1}, "from -100 to 100"),
    ("logit_bias", [7], "from -100 to 100"),
    ("stop", [""], "1 to 1024 characters"),
    ("stop", ["a", 3], "1 to 1024 characters"),
    ("stop", ["x"] * 65, "at most 64 strings"),
    ("stop_token_ids", [-1], "token ids"),
    ("stop_token_ids", ["a"], "token ids"),
    ("ignore_eos", 1, "true or false"),
    ("ignore_eos", "perhaps", "true or false"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", "many", "at least 1"),
    ("max_tokens", 16.5, "at least 1"),
    ("min_tokens", -1, "from 0 to max_tokens"),
    ("logprobs", 21, "from 0 to 20"),
    ("skip_special_tokens", "1", "true or false"),
]


@pytest.mark.parametrize(("name", "value", "rule"), WRONG)
def test_a_wrong_value_names_the_field_its_range_and_the_value(name: str, value: Any, rule: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_json({name: value})
    message = str(caught.value)
    assert name in message
    assert rule in message
    assert "\n" not in message


def test_an_unknown_field_lists_the_valid_ones() -> None:
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'temprature'.*temperature.*top_p"):
        SamplingParams.from_json({"temprature": 1})


def test_several_wrong_fields_are_all_named() -> None:
    with pytest.raises(RequestError, match=r"n must be .*; .*top_p must be"):
        SamplingParams.from_json({"n": 0, "top_p": 2})


def test_min_tokens_above_max_tokens_names_both() -> None:
    with pytest.raises(RequestError, match="min_tokens=9 is above max_tokens=8"):
        SamplingParams.from_json({"min_tokens": 9, "max_tokens": 8})


@pytest.mark.parametrize("source", ["{", "[1]", "7", '"text"', "[" * 100_000, b"\xff{}"])
def test_what_is_not_a_json_object_is_refused(source: str | bytes) -> None:
    with pytest.raises(RequestError, match="sampling parameters"):
        SamplingParams.from_json(source)


def test_strings_are_read_as_numbers_and_booleans() -> None:
    """Triton's vLLM backend casts strings; clients written for it send them."""
    params = SamplingParams.from_json(
        '{"temperature": "0.5", "max_tokens": "7", "ignore_eos": "true", "top_k": "40", "n": 2.0, "seed": null,'
        ' "logit_bias": "{\\"5\\": 1}", "stop": "END"}'
    )
    assert params == SamplingParams(
        temperature=0.5, max_tokens=7, ignore_eos=True, top_k=40, n=2, logit_bias={5: 1.0}, stop=("END",)
    )
    assert not SamplingParams.from_json({"ignore_eos": "False"}).ignore_eos


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams.from_json("")
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert SamplingParams.from_json('{"max_tokens": null}').max_tokens is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(SamplingParams.model_fields)), json_values, max_size=4))
def test_any_json_gives_parameters_or_a_request_error(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams.from_json(json.dumps(values))
    except RequestError:
        return
    assert SamplingParams.from_json(params.model_dump_json()) == params
