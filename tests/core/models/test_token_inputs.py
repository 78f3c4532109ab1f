"""What layers take of tokens, keys that they share and scales of layers: by their formulas, and settings that do not
fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.vision.vision_language import VisionLanguageConfig
from penjing.core.vision.vit import ViTConfig
from tests.conftest import tiny_config

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def test_a_layer_adds_what_a_table_has_of_its_token() -> None:
    torch.manual_seed(0)
    config = tiny_config(model_type="penjing", token_inputs=8, layer_scales=True)
    model = Decoder(config)
    ids = torch.arange(5, 12)[None]
    layer: Any = model.model.layers[1]
    seen: list[torch.Tensor] = []

    def keep(_: object, inputs: Any, made: Any = None) -> None:
        seen.append(inputs[0] if made is None else made)

    layer.mlp.register_forward_hook(keep)
    layer.register_forward_hook(keep)
    layer.post_attention_layernorm.register_forward_pre_hook(keep)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        model(ids)
        residual, made, left = seen
        table = model.model.embed_inputs.weight.view(config.vocab_size, config.num_hidden_layers, 8)
        token, x = layer.token, residual + made
        given = token.out_proj(F.gelu(token.gate_proj(x), approximate="tanh") * table[ids, 1])
        wanted = (x + token.norm(given)) * layer.layer_scale
    torch.testing.assert_close(left, wanted, rtol=1e-5, atol=1e-5)


def test_the_last_layers_read_the_keys_of_their_kind() -> None:
    kinds = ("sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention")
    config = tiny_config(model_type="penjing", num_hidden_layers=5, layer_types=kinds, sliding_window=4, shared_keys=2)
    assert [config.keys_of(layer) for layer in range(5)] == [0, 1, 2, 1, 2]
    assert [config.lends_keys(layer) for layer in range(5)] == [False, True, True, False, False]
    assert config.attention_layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_keys": 2}, "shared_keys=2: each kind of layer needs one before the last 2 to read from"),
        (
            {"shared_keys": 1, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9},
            "each kind of layer needs one before the last 1",
        ),
        ({"shared_keys": 1, "layer_types": ("lsh_attention",)}, "shared_keys=1 is of layers that see all or slide"),
        ({"token_inputs": 8, "model_type": "llama"}, "token_inputs=8: only the model_type 'penjing' has that"),
        ({"token_inputs": 8, "moe": MOE}, "token_inputs=8: not beside moe"),
        ({"token_inputs": 8, "parallel": True}, "layer_scales and token_inputs are of layers whose halves follow"),
        ({"moe": MOE | {"output_norms": True}}, "output_norms needs a shared_expert_intermediate_size above 0"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    values = tiny_config().model_dump() | {"model_type": "penjing"} | changes
    with pytest.raises(ConfigError, match=message):
        parse_config(DecoderConfig, values, "it")


def test_what_sees_has_none() -> None:
    vision = ViTConfig(
        image_size=16, patch_size=4, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    decoder = tiny_config(model_type="penjing", token_inputs=8)
    values = {"vision": vision.model_dump(), "decoder": decoder.model_dump(), "scale_factor": 2, "image_token_id": 3}
    with pytest.raises(ConfigError, match="a decoder that sees has no token_inputs"):
        parse_config(VisionLanguageConfig, values, "it")
