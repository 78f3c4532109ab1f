"""Gates of what attention gives, by their formula, and settings that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.core.models.attention import Attention, causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import inverse_frequencies
from penjing.kernels.rotary import rotary_cos_sin
from tests.conftest import tiny_config

LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize("each", ["head", "channel"])
@pytest.mark.parametrize("function", ["sigmoid", "softplus"])
def test_what_attention_gives_is_multiplied_before_its_last_matrix(each: str, function: str) -> None:
    torch.manual_seed(0)
    fields = {"model_type": "penjing", "attention_gate": each, "attention_gate_function": function}
    config = tiny_config(**fields)
    attention = Attention(config, 0)
    x, cos_sin = torch.randn(2, 9, 64), rotary_cos_sin(inverse_frequencies(config), torch.arange(9).expand(2, 9))
    assert attention.g_proj is not None
    seen: list[Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        attention(x, *cos_sin, causal_attention(config))
        gate = attention.g_proj(x).double()
        attention.g_proj = None
        attention(x, *cos_sin, causal_attention(config))
    gate = torch.sigmoid(gate) if function == "sigmoid" else F.softplus(gate)
    factor = gate.repeat_interleave(config.head_dim if each == "head" else 1, -1)
    torch.testing.assert_close(seen[0].double(), seen[1].double() * factor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_gate": "heads"}, "attention_gate: input should be 'head' or 'channel'"),
        ({"attention_gate": True}, "attention_gate: input should be 'head' or 'channel'"),
        ({"attention_gate_function": "softplus"}, "attention_gate_function='softplus' needs attention_gate"),
        ({"attention_gate": "head", "model_type": "llama"}, "attention_gate=head: only the model_type 'penjing'"),
        ({"attention_gate": "head", "shared_layers": 2}, "attention_gate=head: not beside moe, latent_attention"),
        (
            {"attention_gate": "head", "latent_attention": LATENT, "num_key_value_heads": 4},
            "attention_gate=head: not beside moe, latent_attention",
        ),
        ({"rotary_local_pairs": 9}, "rotary_local_pairs=9: at most 8"),
        ({"rotary_local_pairs": 0}, "rotary_local_pairs"),
        ({"rotary_local_pairs": 10**400}, "rotary_local_pairs"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    values = tiny_config(model_type="penjing").model_dump() | changes
    with pytest.raises(ConfigError, match=message):
        parse_config(DecoderConfig, values, "config.json")


def test_local_layers_turn_as_many_pairs_as_they_say() -> None:
    kinds = {"model_type": "penjing", "layer_rotary": ("main", "local"), "rotary_pairs": 3}
    main, local, none = inverse_frequencies(tiny_config(**kinds, rotary_local_pairs=8)).count_nonzero(-1).tolist()
    assert (main, local, none) == (3, 8, 0)
    assert inverse_frequencies(tiny_config(**kinds)).count_nonzero(-1).tolist() == [3, 3, 0]
