"""config.json beside transformers: what it writes we read the same, what we write it reads the same."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penjing.core.errors import InputError
from penjing.core.layers.settings import RopeScaling
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import SUPPORTED_MODEL_TYPES, decoder_config_from_hf, decoder_config_to_hf
from penjing.core.models.rope import yarn_magnitudes
from penjing.core.models.tensor_names import tensor_shapes
from tests.conftest import tiny_config

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE["original_max_position_embeddings"] = 64
SIZES: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
THEIRS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "llama-mha": LlamaConfig(**SIZES, num_attention_heads=4),
    "llama-3": LlamaConfig(
        **SIZES, **HEADS, max_position_embeddings=131072, rope_parameters={"rope_theta": 500000.0, **LLAMA3}
    ),
    "llama-biases": LlamaConfig(**SIZES, **HEADS, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-stops": LlamaConfig(**SIZES, **HEADS, eos_token_id=[3, 5], head_dim=32),
    "mistral": MistralConfig(**SIZES, **HEADS),
    "mistral-full": MistralConfig(**SIZES, **HEADS, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, **HEADS),
    "qwen2-window": Qwen2Config(**SIZES, **HEADS, use_sliding_window=True, sliding_window=64, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "qwen3-linear": Qwen3Config(
        **SIZES, **HEADS, rope_parameters={"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    ),
}


def from_hf(config: Any) -> DecoderConfig:
    values = json.loads(config.to_json_string(use_diff=False))
    return decoder_config_from_hf(values, "config.json")


def windows_of(config: Any) -> list[int | None]:
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in types]


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_config_is_read_and_written_back_the_same(tmp_path: Path, name: str) -> None:
    theirs = THEIRS[name]
    config = from_hf(theirs)
    (tmp_path / "config.json").write_text(json.dumps(decoder_config_to_hf(config)))
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(theirs)
    fields = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    fields += ["num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "eos_token_id"]
    fields += ["attention_bias", "mlp_bias", "hidden_act", "max_position_embeddings", "bos_token_id", "pad_token_id"]
    for field in fields:
        assert getattr(again, field, None) == getattr(theirs, field, None), field
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert again.head_dim == config.head_dim == head_dim
    ours = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
    assert ours == windows_of(theirs) == windows_of(again)
    assert decoder_config_from_hf(json.loads((tmp_path / "config.json").read_text()), "again") == config


@pytest.mark.parametrize("name", THEIRS)
def test_tensor_names_and_shapes_are_those_of_transformers(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(THEIRS[name])
    expected = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    assert tensor_shapes(from_hf(THEIRS[name])) == expected


def test_a_damaged_number_of_layers_does_not_fill_the_memory() -> None:
    with pytest.raises(InputError, match="num_hidden_layers=2000000000 is above 10000"):
        tensor_shapes(tiny_config(num_hidden_layers=2_000_000_000))


@pytest.mark.parametrize(
    "overrides",
    [
        {"layer_types": ["lsh_attention"], "lsh": {"chunk_size": 32, "rounds": 3, "seed": 5}},
        {"layer_types": ["sliding_attention", "lsh_attention"], "sliding_window": 16},
        {"qk_norm": True, "layer_types": ["full_attention", "lsh_attention"]},
    ],
)
def test_lsh_layers_are_read_back_and_refused_by_transformers(overrides: dict[str, Any]) -> None:
    config = DecoderConfig.model_validate(tiny_config().model_dump() | overrides | {"model_type": "penjing"})
    values = json.loads(json.dumps(decoder_config_to_hf(config)))
    assert decoder_config_from_hf(values, "config.json") == config
    with pytest.raises(Exception, match="penjing"):
        AutoConfig.for_model(**values)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARNS = [YARN, YARN | {"beta_fast": 16.0, "truncate": False, "attention_factor": 1.25}]


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3, *YARNS])
def test_the_old_spelling_of_rotary_settings(scaling: dict[str, Any]) -> None:
    old: dict[str, Any] = {
        "model_type": "llama",
        **SIZES,
        **HEADS,
        "rope_theta": 5000.0,
        "max_position_embeddings": 131072,
    }
    for type_key in ("type", "rope_type"):
        spelled = {type_key if key == "rope_type" else key: value for key, value in scaling.items()}
        config = decoder_config_from_hf(old | {"rope_scaling": spelled}, "config.json")
        assert config.rope_theta == 5000.0
        assert config.rope_scaling == RopeScaling.model_validate(scaling)
    with_scaling: dict[str, Any] = old | {"rope_scaling": scaling}
    theirs = AutoConfig.for_model(**with_scaling)
    frequencies, growth = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    again = AutoConfig.for_model(**decoder_config_to_hf(config))
    found, regrowth = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](again, torch.device("cpu"))
    assert torch.equal(found, frequencies)
    assert regrowth == growth == yarn_magnitudes(config.rope_scaling)[0]


def test_defaults_of_a_sparse_config_are_those_of_transformers() -> None:
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        sparse = {"model_type": model_type, **SIZES, "num_attention_heads": 32, "hidden_size": 4096}
        theirs = AutoConfig.for_model(**sparse)
        ours = decoder_config_from_hf(sparse, "config.json")
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128)
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert [ours.layer_window(layer) for layer in range(4)] == windows_of(theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, r"'bloom' \(BloomForCausalLM\)"),
        ({"model_type": None}, "names no model_type, so that this is no folder of a language model"),
        ({"model_type": "unheard"}, "architecture 'unheard' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "is not supported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"scores texts.*reward\.folder.*\.\.\.ForCausalLM",
        ),
        ({"architectures": "LlamaModel"}, "LlamaModel is not a language model"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' lacks original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"rope_theta": 1.0}}, "rope_theta=1: yarn needs another base"),
        ({"rope_scaling": YARN | {"beta_fast": 1e308}}, "beta_fast"),
        ({"rope_scaling": YARN | {"beta_slow": 5e-324}}, "beta_slow"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1e308}}, "mscale_all_dim"),
        ({"rope_scaling": LONGROPE, "max_position_embeddings": 10**400}, "max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rotary scaling 'dynamic' lacks factor"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "rotary scaling 'ntk' is not supported"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be a positive whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive whole number"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive whole number"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"tie_word_embeddings": "perhaps"}, "tie_word_embeddings"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false (got 'yes')"),
        ({"attention_bias": "no"}, "attention_bias must be true or false (got 'no')"),
        ({"mlp_bias": 0}, "mlp_bias must be true or false (got 0)"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window must be true or false"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": "no"}, "norm_topk_prob must be true or false"),
        (
            {"max_position_embeddings": 10**20},
            "max_position_embeddings: no model has 100000000000000000000",
        ),
        ({"max_position_embeddings": "2048"}, "max_position_embeddings: input should be a valid integer"),
        ({"max_position_embeddings": 2048.0}, "max_position_embeddings: input should be a valid integer"),
        ({"vocab_size": 10**20}, "vocab_size: no model has 100000000000000000000"),
        ({"rope_theta": "10000"}, "rope_theta: input should be a valid number"),
        ({"rms_norm_eps": True}, "rms_norm_eps: input should be a valid number"),
        ({"eos_token_id": "2"}, "eos_token_ids"),
        ({"bos_token_id": True}, "bos_token_id: input should be a valid integer"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor: input should be a valid number"),
        ({"eos_token_id": "</s>"}, "eos_token_ids"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full"]}, "layer_types must name"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    values = {"model_type": "llama", **SIZES, **HEADS} | changes
    with pytest.raises(InputError, match=message if "\\" in message else re.escape(message)):
        decoder_config_from_hf(values, "config.json")


@pytest.mark.parametrize(
    "overrides",
    [
        {"qk_norm": True},
        {"attention_bias": True},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "mistral", "mlp_bias": True},
        {"sliding_window": 16},
        {"layer_types": ["lsh_attention"]},
        {"model_type": "qwen3", "qk_norm": True, "layer_types": ["full_attention", "lsh_attention"]},
    ],
)
def test_a_config_without_an_architecture_is_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no Hugging Face architecture of type"):
        decoder_config_to_hf(tiny_config(**overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mlp_hadamard": 32}, "of the model_type 'penjing'"),
        ({"model_type": "penjing", "mlp_hadamard": 64}, "needed that divides 96"),
        ({"model_type": "penjing", "mlp_hadamard": 24}, "a power of two"),
        ({"model_type": "penjing", "mlp_hadamard": 32, "intermediate_sizes": (96, 80)}, "needed that divides 80"),
        ({"table_hadamard": 32}, "only the model_type 'penjing' has that"),
        ({"model_type": "penjing", "table_hadamard": 24}, "a power of two"),
        ({"model_type": "penjing", "table_hadamard": 128}, "needed that divides 64"),
    ],
)
def test_a_transform_that_does_not_fit_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny_config(**overrides)


ODD = ("llama3", "yes", "2", 10**20, -(10**20), 10**400)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**7) | st.floats() | st.text(max_size=5) | st.sampled_from(ODD),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(sorted(LLAMA3)), children),
    max_leaves=5,
)
FIELDS = [*sorted(decoder_config_to_hf(from_hf(THEIRS["qwen2-window"]))), "attention_bias", "mlp_bias", "rope_scaling"]


@given(st.sampled_from(SUPPORTED_MODEL_TYPES), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_json_is_a_config_or_an_input_error(model_type: str, changes: dict[str, Any]) -> None:
    values = {"model_type": model_type, **SIZES, **HEADS} | changes
    with contextlib.suppress(InputError):
        decoder_config_from_hf(values, "config.json")


def test_a_head_larger_than_any_model_has() -> None:
    """Refused as a number: the rotary frequencies of such a head would take all memory before a weight is read."""
    config = tiny_config()
    values = decoder_config_to_hf(config) | {"head_dim": 10**12}
    with pytest.raises(InputError, match="head_dim"):
        decoder_config_from_hf(values, "config.json")
