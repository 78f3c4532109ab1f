"""config.json of LFM2 as it was published, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf

# LFM2-1.2B; names that older folders have stand beside those of transformers.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_use_swiglu": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "tie_embedding": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def test_a_published_folder_is_read_as_transformers_reads_it() -> None:
    config, theirs = fold_from_hf(PUBLISHED, "it").config, Lfm2Config(**PUBLISHED)
    assert config.intermediate_size == 8192
    assert theirs.layer_types is not None
    for layer, kind in enumerate(theirs.layer_types):
        assert config.layer_type(layer) == ("short_conv" if kind == "conv" else kind)
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (64, 1e6, theirs.tie_word_embeddings)
    assert (config.conv_taps, config.rms_norm_eps, config.eos_token_ids) == (3, 1e-5, (7,))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ff_dim": 6656, "hidden_size": 1024},
        {"block_ff_dim": 1000, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 64},
        {"block_ff_dim": 4608, "block_auto_adjust_ff_dim": False},
    ],
)
def test_the_width_of_the_mlp_follows_the_rule(changes: dict[str, Any]) -> None:
    with torch.device("meta"):
        expected = Lfm2MLP(Lfm2Config(**PUBLISHED | changes)).w1.weight.shape[0]
    assert fold_from_hf(PUBLISHED | changes, "it").config.intermediate_size == expected


def test_what_the_file_leaves_out_is_what_transformers_assumes() -> None:
    config, theirs = fold_from_hf({"model_type": "lfm2"}, "it").config, Lfm2Config()
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.layer_types is None
    assert theirs.layer_types == ["full_attention"] * 32
    assert config.rope_theta == dict(theirs.rope_parameters or {})["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 16}, "a layer with attention is needed besides"),
        ({"layer_types": ["conv", "mamba"] * 8}, "layer_types must name conv or full_attention for 16 layers"),
        ({"layer_types": ["full_attention"]}, "layer_types must name conv or full_attention for 16 layers"),
        ({"full_attn_idxs": "2, 5"}, "full_attn_idxs must be numbers of layers"),
        ({"conv_L_cache": 0}, "conv_L_cache must be a positive whole number"),
        ({"conv_bias": 1}, "conv_bias must be true or false"),
        ({"block_ff_dim": -1}, "intermediate_size must be a positive whole number"),
        ({"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier must be a positive number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a positive whole number"),
        ({"architectures": ["Lfm2VlForConditionalGeneration"]}, "take a Lfm2ForCausalLM folder"),
        ({"model_type": "lfm2_moe", "num_dense_layers": "2"}, "num_dense_layers must be a whole number"),
        ({"model_type": "lfm2_moe", "use_expert_bias": None, "num_experts": 0}, "num_experts must be a positive"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    values = PUBLISHED | changes
    if values["model_type"] == "lfm2_moe":
        values["architectures"] = ["Lfm2MoeForCausalLM"]
    with pytest.raises(InputError, match=message):
        fold_from_hf(values, "it")
