"""The shape's counts against the model itself: parameters on the meta device, FLOPs by torch's counter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.train.monitor.flops import forward_flops
from penjing.train.objective.objective import Batch, Loss
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.recipe.recipe import TrainRecipe

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}
CONVOLUTIONS = {
    "model_type": "penjing",
    "layer_types": ["short_conv", "full_attention", "short_conv"],
    "conv_taps": 3,
}
VARIANTS = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "qk_norm": True},
    "inner norms": {"model_type": "penjing", "inner_norms": True, "head_dim": 6},
    "experts": {"model_type": "penjing", "moe": MOE | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}},
    "gates": {
        "model_type": "penjing",
        "moe": MOE | {"shared_expert_intermediate_size": 8, "shared_expert_gate": True, "router_bias": True},
    },
    "gates of heads": {"model_type": "penjing", "attention_gate": "head", "moe": MOE},
    "gates of channels": CONVOLUTIONS | {"attention_gate": "channel"},
    "convolutions": CONVOLUTIONS,
    "biases of convolutions": CONVOLUTIONS | {"conv_bias": True, "qk_norm": True},
    "tokens": {
        "model_type": "penjing",
        "token_inputs": 6,
        "shared_keys": 2,
        "qk_norm": True,
        "value_norm": True,
        "layer_scales": True,
    },
    "norms of experts": {
        "model_type": "penjing",
        "moe": MOE | {"shared_expert_intermediate_size": 40, "output_norms": True},
    },
    "latent": {"model_type": "penjing", "num_key_value_heads": 4, "latent_attention": LATENT},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_parameters_are_those_of_the_model(variant):
    config = DecoderConfig.model_validate(SMALL | variant)
    with torch.device("meta"):
        model = Decoder(config)
    assert decoder_shape(config).parameters == sum(parameter.numel() for parameter in model.parameters())


class Everything:
    """All logits: the loss of training never has them at once."""

    def count(self, batch: Batch) -> int:
        return batch["token_ids"].numel()

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch["token_ids"]).sum())


@pytest.mark.parametrize("variant", ["llama", "tied", "experts", "convolutions"])
def test_flops_are_those_that_run(variant):
    config = DecoderConfig.model_validate(SMALL | VARIANTS[variant])
    shape = decoder_shape(config)
    tokens = torch.arange(96).view(2, 48) % 128
    counted = forward_flops(Decoder(config), Everything(), {"token_ids": tokens})
    # norms, biases and the router's correction are parameters, but no matrix products
    assert shape.model_flops(48) / 3 * 96 == pytest.approx(counted, rel=0.01)


def test_published_sizes():
    sizes = {
        "8B": (
            {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
            8.03,
        ),
        "70B": (
            {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
            70.55,
        ),
        "405B": (
            {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
            405.85,
        ),
    }
    for values, billions in sizes.values():
        config = DecoderConfig.model_validate(LLAMA | values)
        assert decoder_shape(config).parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_only_decoders_are_planned():
    recipe = load_recipe(TrainRecipe, RECIPES / "resnet-fashion.toml")
    with pytest.raises(ConfigError, match="planning is for decoders"):
        decoder_shape(recipe.model)
