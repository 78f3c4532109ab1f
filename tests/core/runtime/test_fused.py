"""The fused step beside the decoder it was made from: the same bits as its layers one by one, float64 close by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penjing.core.checkpoint.load import load_model
from penjing.core.models.attention import causal_attention
from penjing.core.models.decoder import Decoder
from penjing.core.models.rope import layer_angles
from penjing.core.runtime.fused import fuse_decoder, fuse_layer, why_not_fused
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.dispatch import force_torch
from tests.core.artifact.int4_artifact import quantization_config as int4_config
from tests.core.artifact.int4_artifact import write_int4_artifact
from tests.core.artifact.int8_artifact import above_zero_points, quantization_config, write_int8_artifact
from tests.core.models.paged_decoder import Pages
from tests.kernels.cpu import by_token, needs_extension

pytestmark = needs_extension
BLOCK_SIZE = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "wide": {"intermediate_size": 640},  # three blocks of inputs above zero points, the last a short one
    "qwen2": {"model_type": "qwen2", "attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 24},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "window": {"model_type": "mistral", "sliding_window": 20},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "longrope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": tuple(1 + step / 4 for step in range(8)),
            "attention_factor": 1.2,
        }
    },
    "hadamard": {"model_type": "penjing", "mlp_hadamard": 32},
    "turned table": {"model_type": "penjing", "table_hadamard": 32, "mlp_hadamard": 16},
    "windows": {
        "model_type": "qwen2",
        "attention_bias": True,
        "sliding_window": 20,
        "layer_types": ("full_attention", "sliding_attention"),
    },
    "gemma": {
        "model_type": "penjing",
        "norms": "around",
        "qk_norm": True,
        "activation": "gelu_tanh",
        "head_dim": 24,
        "sliding_window": 20,
        "layer_types": ("sliding_attention", "full_attention"),
        "layer_rotary": ("local", "main"),
        "rope_theta": 1e6,
    },
    "olmo": {"model_type": "penjing", "norms": "after", "qk_norm": True, "qk_norm_over": "all"},
    "hunyuan": {"model_type": "penjing", "qk_norm": True, "qk_norm_rotated": True, "head_dim": 24},
    "still": {"model_type": "penjing", "layer_rotary": ("main", "none"), "rotary_pairs": 5},
    "neox": {
        "model_type": "penjing",
        "mlp_gated": False,
        "activation": "gelu",
        "parallel": True,
        "head_bias": True,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    "arcee": {"model_type": "penjing", "mlp_gated": False, "activation": "relu2"},
    "opt": {
        "model_type": "penjing",
        "mlp_gated": False,
        "activation": "relu",
        "learned_positions": True,
        "layer_rotary": ("none", "none"),
    },
    "bitnet": {"model_type": "penjing", "inner_norms": True, "activation": "relu2", "attention_output_bias": True},
    "sub-norms": {
        "model_type": "penjing",
        "inner_norms": True,
        "mlp_hadamard": 16,
        "mlp_gated": False,
        "activation": "gelu",
    },
    "sinks": {
        "model_type": "penjing",
        "attention_sinks": True,
        "sliding_window": 20,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "trinity": {
        "model_type": "penjing",
        "attention_gate": "channel",
        "norms": "around",
        "qk_norm": True,
        "sliding_window": 20,
        "layer_types": ("sliding_attention", "full_attention"),
        "layer_rotary": ("main", "none"),
    },
    "laguna": {
        "model_type": "penjing",
        "attention_gate": "head",
        "attention_gate_function": "softplus",
        "qk_norm": True,
        "sliding_window": 20,
        "layer_types": ("sliding_attention", "full_attention"),
        "layer_rotary": ("local", "main"),
        "rotary_pairs": 3,
        "rotary_local_pairs": 8,
        "attention_bias": True,
    },
    "lfm3": {
        "model_type": "penjing",
        "attention_gate": "head",
        "norms": "around",
        "inner_norms": True,
        "layer_types": ("full_attention", "short_conv"),
        "conv_taps": 7,
    },
    "gemma4": {
        "model_type": "penjing",
        "norms": "around",
        "qk_norm": True,
        "value_norm": True,
        "layer_scales": True,
        "activation": "gelu_tanh",
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 20,
        "layer_rotary": ("local", "main"),
        "rotary_pairs": 2,
        "rotary_local_pairs": 4,
        "logit_cap": 2.0,
    },
    "gemma4 small": {
        "model_type": "penjing",
        "norms": "around",
        "qk_norm": True,
        "value_norm": True,
        "num_hidden_layers": 4,
        "layer_types": ("full_attention", "sliding_attention") * 2,
        "sliding_window": 20,
        "shared_keys": 2,
        "token_inputs": 32,
        "intermediate_size": 192,
        "intermediate_sizes": (96, 96, 192, 192),
        "layer_scales": True,
    },
    "tokens": {"model_type": "penjing", "token_inputs": 64, "shared_keys": 1},
    "scales alone": {"model_type": "penjing", "layer_scales": True, "value_norm": True},
    "conv": {
        "model_type": "penjing",
        "layer_types": ("short_conv", "full_attention"),
        "conv_taps": 3,
        "conv_bias": True,
        "qk_norm": True,
    },
    "conv behind": {
        "model_type": "penjing",
        "layer_types": ("full_attention", "short_conv"),
        "conv_taps": 20,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "apertus": {"model_type": "penjing", "mlp_gated": False, "activation": "xielu", "qk_norm": True},
    "gemma2": {
        "model_type": "penjing",
        "norms": "around",
        "activation": "gelu_tanh",
        "sliding_window": 20,
        "layer_types": ("sliding_attention", "full_attention"),
        "attention_cap": 1.5,
        "logit_cap": 2.0,
    },
    "odd": {
        "hidden_size": 50,
        "intermediate_size": 75,
        "head_dim": 10,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
}
MakeCheckpoint = Callable[..., Path]


def make(make_tiny_checkpoint: MakeCheckpoint, folder: Path, name: str, scheme: str) -> Decoder:
    checkpoint = make_tiny_checkpoint(**CONFIGS[name])
    if scheme == "fp32":
        return load_model(checkpoint).model
    if scheme.startswith("int4"):
        eight = ("v_proj", "gate_proj", "down_proj") if scheme == "int4-mixed" else ()
        eight = ("k_proj", "up_proj") if scheme == "int4-bf16" and name == "llama" else eight
        scales = torch.float16 if scheme == "int4-half" else torch.bfloat16
        quantization = int4_config([f"re:.*{end}$" for end in eight])
        if scheme == "int4-bf16":
            quantization["config_groups"]["group_0"]["input_activations"] = None
        out = folder / "int4"
        write_int4_artifact(checkpoint, out, eight=eight, scale_dtype=scales, quantization=quantization)
        return load_model(out).model
    half = torch.bfloat16 if scheme == "int8-half" else torch.float32
    quantize_head = scheme != "int8" and name not in ("untied", "neox")  # the helper makes an INT8 head of a tied one
    ignore, groups = (
        [] if quantize_head else ["lm_head"],
        above_zero_points("re:.*down_proj", "re:.*self_attn.[qkvg]_proj"),
    )
    quantization = quantization_config(ignore, config_groups=groups) if scheme == "int8-above" else None
    out = write_int8_artifact(
        checkpoint, folder / "int8", quantize_head=quantize_head, embedding_dtype=half, quantization=quantization
    )
    return load_model(out).model


def fused_step(step: DecoderStep, pages: Pages, parts: list[tuple[Tensor, int, list[int]]]) -> Tensor:
    """Logits of all rows; the arguments are those of `Pages.run`."""
    positions = [torch.arange(past, past + len(ids)) for ids, past, _ in parts]
    tables = [torch.tensor(blocks) for _, _, blocks in parts]
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, positions, strict=True)]
    ids = torch.cat([ids for ids, _, _ in parts])
    return step.step(
        ids.int(),
        torch.cat(positions).int(),
        torch.cat(slots),
        torch.tensor([0] + [len(ids) for ids, _, _ in parts]).cumsum(0).int(),
        torch.tensor([past + len(ids) for ids, past, _ in parts], dtype=torch.int32),
        torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int(),
        torch.arange(len(ids), dtype=torch.int32),
        pages.pool,
        row_pool=pages.rows if len(pages.rows) else None,
    ).clone()


def fuse(model: Decoder) -> DecoderStep:
    step = fuse_decoder(model)
    assert step is not None
    return step


def draw_ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, scheme) for name in CONFIGS for scheme in ("fp32", "int8", "int8-head", "int8-half", "int8-above")),
        *((name, scheme) for name in CONFIGS if name != "odd" for scheme in ("int4", "int4-mixed", "int4-bf16")),
        ("llama", "int4-half"),
    ],
)
def test_bits_of_the_layers_one_by_one(
    make_tiny_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, scheme: str
) -> None:
    model = make(make_tiny_checkpoint, tmp_path, name, scheme)
    step = fuse(model)
    pages, pages_fused = (Pages(model.config, 40, BLOCK_SIZE) for _ in range(2))
    first, second, third = draw_ids(150, 1), draw_ids(9, 2), draw_ids(40, 3)
    steps = [
        [(first[:130], 0, list(range(9)))],  # rows are shared out
        [(first[130:], 130, list(range(10))), (second[:8], 0, [30])],  # outputs are shared out
        [(second[8:], 8, [30]), (third[:1], 0, [20, 21, 22])],  # every member quantizes for itself
        [(third[1:], 1, [20, 21, 22])],
    ]
    for parts in steps:
        with torch.inference_mode():
            expected = pages.run(model, parts)
        assert torch.equal(fused_step(step, pages_fused, parts), expected)
    assert not pages.pool[:, 0].isnan().equal(pages_fused.pool[:, 0].isnan())  # a step's pages are turned
    pages_fused.pool[:, 0] = by_token(pages_fused.pool[:, 0])
    torch.testing.assert_close(pages_fused.pool, pages.pool, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_close_to_float64(make_tiny_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    model = make(make_tiny_checkpoint, tmp_path, name, "fp32")
    ids = draw_ids(100, 4)
    logits = fused_step(fuse(model), Pages(model.config, 10, BLOCK_SIZE), [(ids, 0, list(range(7)))])
    with torch.inference_mode(), force_torch():
        same_type = model(ids)
        wide = Decoder(model.config)
        wide.load_state_dict(model.state_dict())
        expected = wide.double()(ids)
    error, bound = (logits - expected).abs().max(), (same_type - expected).abs().max()
    assert error <= 2 * bound + 1e-5


def test_chosen_rows(make_tiny_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = make(make_tiny_checkpoint, tmp_path, "llama", "int8-head")
    step, pages, ids = fuse(model), Pages(model.config, 10, BLOCK_SIZE), draw_ids(140, 5)
    every = fused_step(step, pages, [(ids, 0, list(range(9)))])
    for rows in ([139], [0, 17, 139], list(range(3, 60)), []):
        arguments = (
            torch.arange(140).int(),
            torch.arange(140),
            torch.tensor([0, 140]).int(),
            torch.tensor([140]).int(),
        )
        table = torch.arange(9, dtype=torch.int32)[None]
        some = step.step(ids.int(), *arguments, table, torch.tensor(rows, dtype=torch.int32), pages.pool)
        assert torch.equal(some, every[rows])


@pytest.mark.parametrize(("scheme", "bound"), [("fp32", 1e-6), ("int8", 1e-3), ("int4", 1e-3)])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("odd", "gemma4 small", "tokens")])
def test_a_layer_alone(
    make_tiny_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, scheme: str, bound: float
) -> None:
    model = make(make_tiny_checkpoint, tmp_path, name, scheme)
    hidden_WTE = torch.randn(2, 37, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    angles = layer_angles(model.config, model.model.inverse_frequency, torch.arange(37))
    for index, layer in enumerate(model.model.layers):
        fused = fuse_layer(model.config, index, layer)  # type: ignore[arg-type]
        assert fused is not None
        with torch.inference_mode():
            expected_WTE = torch.cat(
                [layer(x[None], *angles(index), causal_attention(model.config)) for x in hidden_WTE]
            )
        # Where a sum in another order moves a rounded input by a step, what depends on it differs; few do.
        assert (fused(hidden_WTE) - expected_WTE).abs().mean() < bound * expected_WTE.std()
        hidden_WTE = expected_WTE
    with force_torch():
        assert fuse_layer(model.config, 0, model.model.layers[0]) is None  # type: ignore[arg-type]


def test_reasons_to_stay_on_torch(make_tiny_checkpoint: MakeCheckpoint) -> None:
    def load() -> Decoder:
        return load_model(make_tiny_checkpoint()).model

    assert why_not_fused(load()) is None
    with force_torch():
        assert why_not_fused(load()) == "the C++ extension is not built or switched off"
        assert fuse_decoder(load()) is None
    assert why_not_fused(load().to("meta")) == "the model is on meta"
    changed = load()
    changed.set_submodule("model.layers.0.mlp.up_proj", nn.Sequential())
    assert why_not_fused(changed) == "model.layers.0.mlp.up_proj is a Sequential"
    changed = load()
    changed.get_submodule("model.layers.1.mlp").add_module("act", nn.SiLU())
    assert why_not_fused(changed) == "model.layers.1.mlp.act is a SiLU"
    changed = load().double()
    assert why_not_fused(changed) is not None
    changed = load()
    weight = changed.get_parameter("model.layers.0.mlp.up_proj.weight")
    weight.data = weight.data.t().contiguous().t()
    assert "strides (1, 96)" in str(why_not_fused(changed))
