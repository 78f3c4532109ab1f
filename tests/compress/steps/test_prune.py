"""Pruning from checkpoint to checkpoint: the result is what the dense network is with the same units at zero."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from penjing.compress.prune.graph import dependency_graph
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import verify
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet_config import BlockConfig, ResNetConfig, StageConfig
from penjing.core.progress import Silent
from penjing.train.data.pack import pack
from penjing.train.run import train
from tests.compress.conftest import Notes, write_recipe
from tests.compress.prune.checkpoints import decoder, images, masked, prune, resnet, tokens

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def load(folder: Path) -> Decoder:
    """The decoder in float32."""
    verify(folder)
    checkpoint = open_checkpoint(folder)
    model = Decoder(checkpoint.config)
    model.load_state_dict({name: checkpoint.get(name).float() for name in checkpoint.tensor_names}, strict=False)
    assert {name for name, _ in model.named_parameters()} == set(checkpoint.tensor_names)
    return model.eval()


def output(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model(x)
    return getattr(result, "logits", result)


def graph_of(model: Decoder) -> Any:
    return dependency_graph(model, (torch.zeros(2, 16, dtype=torch.int64),)).groups


@pytest.mark.parametrize(
    ("parts", "method"),
    [
        (("ffn",), "taylor"),
        (("heads",), "l2"),
        (("heads", "hidden"), "random"),
        (("ffn", "heads", "hidden"), "l1"),
        (("ffn", "heads", "hidden"), "activation"),
    ],
)
def test_a_pruned_decoder_is_the_masked_one(tmp_path: Path, parts: tuple[str, ...], method: str) -> None:
    """The norms too: over fewer channels they are scaled to what they are over all with the others at zero."""
    dense = decoder(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "pruned", tokens(), parts=parts, method=method, ratio=0.3)
    pruned = load(tmp_path / "pruned")
    expected = output(masked(dense, record, graph_of(dense)), PROMPT)
    assert (output(pruned, PROMPT) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert record["parameters"]["after"] == sum(p.numel() for p in pruned.parameters())
    assert record["parameters"]["before"] == sum(p.numel() for p in dense.parameters())
    assert record["bytes"] == {key: 4 * value for key, value in record["parameters"].items()}
    config = pruned.config
    assert (config.intermediate_size, config.intermediate_sizes) == (40 if "ffn" in parts else 48, None)
    assert (config.num_attention_heads, config.num_key_value_heads) == ((6, 3) if "heads" in parts else (8, 4))
    assert config.hidden_size == (24 if "hidden" in parts else 32)
    assert {row["part"] for row in record["groups"]} == set(parts)
    json.dumps(record)


@pytest.mark.parametrize(
    "changed",
    [
        {"norms": "around", "activation": "gelu_tanh", "attention_cap": 1.5, "logit_cap": 2.0},
        {"mlp_gated": False, "activation": "gelu", "parallel": True, "head_bias": True, "tie_word_embeddings": False},
        {"norms": "after", "qk_norm": True, "qk_norm_over": "all", "rms_norm_eps": 1e-9},
        {"mlp_gated": False, "activation": "relu", "learned_positions": True, "layer_rotary": ["none"] * 3},
        {"mlp_gated": False, "activation": "xielu", "qk_norm": True},
        {"inner_norms": True, "activation": "relu2", "rms_norm_eps": 1e-9},
        {"attention_gate": "channel", "qk_norm": True},
        {"attention_gate": "head", "attention_gate_function": "softplus"},
        {"value_norm": True, "layer_scales": True, "norms": "around", "qk_norm": True},
    ],
    ids=[
        *("caps", "parallel", "norms-over-heads", "positions", "xielu", "inner-norms", "gates", "gates-of-heads"),
        "scales",
    ],
)
def test_decoders_of_other_layers_are_the_masked_ones(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A soft cap changes each score by itself, so that heads leave as they do without one."""
    dense = decoder(tmp_path / "dense", model_type="penjing", **changed)
    parts: dict[str, Any] = {"parts": ["ffn", "heads", "hidden"], "ratio": 0.3}
    # Of the gates of heads a head of keys has two, which are no multiple of 8.
    record = prune(tmp_path / "dense", tmp_path / "pruned", tokens(), **parts, round_to=2)
    assert {row["part"] for row in record["groups"]} == {"ffn", "heads", "hidden"}
    groups = graph_of(Decoder(dense.config.model_copy(update={"attention_cap": None})))
    expected = output(masked(dense, record, groups), PROMPT)
    assert (output(load(tmp_path / "pruned"), PROMPT) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_decoder_with_convolutions_is_the_masked_one(tmp_path: Path, notes: Notes) -> None:
    changed: dict[str, Any] = {
        "model_type": "penjing",
        "num_hidden_layers": 3,
        "layer_types": ["short_conv", "full_attention", "short_conv"],
        "conv_taps": 3,
    }
    dense = decoder(tmp_path / "dense", **changed)
    record = prune(tmp_path / "dense", tmp_path / "pruned", tokens(), parts=("ffn", "heads"), method="l1", ratio=0.3)
    expected = output(masked(dense, record, graph_of(dense)), PROMPT)
    pruned = load(tmp_path / "pruned")
    assert (output(pruned, PROMPT) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (pruned.config.num_key_value_heads, pruned.config.layer_types) == (3, dense.config.layer_types)
    with pytest.raises(InputError, match="short convolutions, which are as wide as the network: leave 'hidden' out"):
        prune(tmp_path / "dense", tmp_path / "narrow", tokens(), parts=("hidden",), ratio=0.3)


def test_layers_with_convolutions_leave_and_are_corrected_for_what_left(tmp_path: Path) -> None:
    changed: dict[str, Any] = {
        "model_type": "penjing",
        "num_hidden_layers": 4,
        "layer_types": ["short_conv", "full_attention", "short_conv", "full_attention"],
        "conv_taps": 3,
    }
    decoder(tmp_path / "dense", **changed)
    how: dict[str, Any] = {"method": "obs", "ratio": 0.3, "reconstruct": True}
    record = prune(tmp_path / "dense", tmp_path / "fewer", tokens(), parts=("ffn", "layers"), layers=(2,), **how)
    fewer = load(tmp_path / "fewer")
    assert fewer.config.layer_types == ("short_conv", "full_attention", "full_attention")
    assert bool(output(fewer, PROMPT).isfinite().all())
    assert all(row["error_left"] < 1 for row in record["reconstructed"])
    prune(tmp_path / "dense", tmp_path / "none", tokens(), parts=("layers",), layers=(0, 2))
    assert (load(tmp_path / "none").config.conv_taps, load(tmp_path / "none").config.layer_types) == (0, None)
    with pytest.raises(ConfigError, match="none with attention stays, only short convolutions"):
        prune(tmp_path / "dense", tmp_path / "odd", tokens(), parts=("layers",), layers=(1, 3))


def test_heads_with_sinks_stay(tmp_path: Path, notes: Notes) -> None:
    dense = decoder(tmp_path / "dense", model_type="penjing", attention_sinks=True)
    with pytest.raises(InputError, match="attention_sinks, a number of each head: leave 'heads' out of parts"):
        prune(tmp_path / "dense", tmp_path / "none", parts=["ffn", "heads"], ratio=0.3)
    record = prune(tmp_path / "dense", tmp_path / "pruned", parts=["ffn", "hidden"], ratio=0.3, progress=notes)
    assert {row["part"] for row in record["groups"]} == {"ffn", "hidden"}
    assert not [line for line in notes.lines if "there is no rule for it" in line], notes.lines
    groups = graph_of(Decoder(dense.config.model_copy(update={"attention_sinks": False})))
    expected = output(masked(dense, record, groups), PROMPT)
    assert (output(load(tmp_path / "pruned"), PROMPT) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("changed", [{}, {"tie_word_embeddings": False}, {"model_type": "qwen3", "qk_norm": True}])
def test_uniform_widths_load_in_transformers(tmp_path: Path, changed: dict[str, Any]) -> None:
    decoder(tmp_path / "dense", **changed)
    prune(tmp_path / "dense", tmp_path / "pruned", parts=["ffn", "heads", "hidden", "layers"], layers=[1], ratio=0.3)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float32)
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if changed.get("qk_norm") else "LlamaForCausalLM")
    expected = output(theirs.eval(), PROMPT)
    torch.testing.assert_close(output(load(tmp_path / "pruned"), PROMPT), expected, atol=1e-5, rtol=1e-5)


def test_ranking_over_all_layers_leaves_widths_of_their_own(tmp_path: Path) -> None:
    dense = decoder(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "pruned", tokens(), rank="global", ratio=0.4, round_to=2)
    pruned = load(tmp_path / "pruned")
    sizes = pruned.config.intermediate_sizes
    assert pruned.config.model_type == "penjing"
    assert sizes is not None
    assert len(set(sizes)) > 1
    assert all(size % 2 == 0 for size in sizes)
    expected = output(masked(dense, record, graph_of(dense)), PROMPT)
    torch.testing.assert_close(output(pruned, PROMPT), expected, atol=1e-5, rtol=1e-5)
    again = prune(tmp_path / "pruned", tmp_path / "twice", ratio=0.3, round_to=1, parts=["ffn", "layers"], layers=[0])
    assert load(tmp_path / "twice").config.num_hidden_layers == 2
    assert again["parameters"]["before"] == record["parameters"]["after"]


def test_half_precision_stays(tmp_path: Path) -> None:
    decoder(tmp_path / "dense", torch.bfloat16)
    record = prune(tmp_path / "dense", tmp_path / "pruned", ratio=0.3)
    checkpoint = open_checkpoint(tmp_path / "pruned")
    assert {checkpoint.dtype(name) for name in checkpoint.tensor_names} == {"BF16"}
    assert checkpoint.config_json["dtype"] == "bfloat16"
    assert record["bytes"]["after"] == 2 * record["parameters"]["after"]


def test_the_layer_that_changes_nothing_leaves(tmp_path: Path) -> None:
    dense = decoder(tmp_path / "dense")
    idle = dense.model.layers[1]
    with torch.no_grad():
        idle.self_attn.o_proj.weight.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        idle.mlp.down_proj.weight.zero_()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    from penjing.core.checkpoint.decoder import save_checkpoint
    from penjing.core.manifest import write_manifest

    (tmp_path / "idle").mkdir()
    save_checkpoint(tmp_path / "idle", dense.config, dense.named_parameters())
    write_manifest(tmp_path / "idle", "checkpoint", {})
    record = prune(tmp_path / "idle", tmp_path / "pruned", tokens(), parts=["layers"], layers=1)
    assert record["layers_dropped"] == [1]
    assert record["block_influence"][1] == pytest.approx(0, abs=1e-9)
    assert min(record["block_influence"][0], record["block_influence"][2]) > 1e-3
    expected = output(dense, PROMPT)
    torch.testing.assert_close(output(load(tmp_path / "pruned"), PROMPT), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("rank", "method"), [("local", "l1"), ("global", "taylor"), ("isomorphic", "activation"), ("global", "random")]
)
def test_a_pruned_classifier_is_the_masked_one(tmp_path: Path, rank: str, method: str) -> None:
    dense = resnet(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "pruned", images(), rank=rank, ratio=0.4, round_to=4, method=method)
    pruned, _ = load_classifier(tmp_path / "pruned")
    x = torch.randn(3, 1, 12, 12)
    groups = dependency_graph(dense, (x,)).groups
    expected = output(masked(dense, record, groups), x)
    assert (output(pruned, x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert record["parameters"]["after"] == sum(p.numel() for p in pruned.parameters())
    assert all(row["after"] % 4 == 0 and row["after"] < row["before"] for row in record["groups"])
    assert record["groups"]
    loss = nn.functional.cross_entropy(pruned.train()(x), torch.tensor([1, 2, 3]))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in pruned.parameters() if p.grad is not None)


@pytest.mark.parametrize("groups", [1, 2])
def test_widths_made_equal_keep_the_shortcuts_convolution(tmp_path: Path, groups: int) -> None:
    block = BlockConfig(hidden=(8, 8))
    stages = (StageConfig(channels=32, blocks=(block, block)),)
    sizes: dict[str, Any] = {"in_channels": 1, "num_classes": 10, "stem_channels": 8, "groups": groups}
    dense = resnet(tmp_path / "dense", ResNetConfig(stem="cifar", block="bottleneck", stages=stages, **sizes))
    # Protected, the stem keeps its 8 channels; the stage falls from 32 to 8.
    step: dict[str, Any] = {"ratio": 0.75, "round_to": 2, "protect": ["stem.*"]}
    record = prune(tmp_path / "dense", tmp_path / "pruned", **step)
    pruned, vision = load_classifier(tmp_path / "pruned")
    assert vision.model.stages[0].channels == vision.model.stem_channels == 8
    assert vision.model.stages[0].blocks[0].projection
    x = torch.randn(2, 1, 12, 12)
    expected = output(masked(dense, record, dependency_graph(dense, (x,)).groups), x)
    assert (output(pruned, x) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_pruned_decoder_is_quantized_and_trained_on(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """INT8 and the training loop take widths that differ from layer to layer."""
    source = make_tiny_checkpoint(num_hidden_layers=3, intermediate_size=192)
    prune(source, tmp_path / "pruned", rank="global", ratio=0.3, round_to=1)
    config = open_checkpoint(tmp_path / "pruned").config
    assert config.intermediate_sizes is not None
    artifact = run_recipe(write_recipe(tmp_path, tmp_path / "pruned", tmp_path / "int8"))
    assert load_model(artifact).config.intermediate_sizes == config.intermediate_sizes

    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(f"It never rains but it pours on day {number}. " * 20)
    (tmp_path / "shards").mkdir()
    pack(tmp_path / "shards", (str(texts),), 320, held_out=0.2, tokenizer=source, progress=Silent())
    sizes = config.model_dump(mode="json", exclude={"bos_token_id", "eos_token_ids", "pad_token_id"}, exclude_none=True)
    model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in sizes.items() if not isinstance(value, dict))
    (tmp_path / "train.toml").write_text(
        f'output = "{tmp_path}/trained"\nsteps = 1\ninitial = "{tmp_path}/pruned"\ndevice = "cpu"\n'
        f'[model]\narchitecture = "decoder"\n{model}\n[monitor]\ntensorboard = false\n'
        f'[data]\nkind = "text"\nshards = "{tmp_path}/shards"\nsequence_length = 32\nbatch_size = 4\n'
    )
    train(tmp_path / "train.toml")
    trained, before = load(tmp_path / "trained"), load(tmp_path / "pruned")
    assert trained.config.intermediate_sizes == config.intermediate_sizes
    change = [(a - b).abs().max() for a, b in zip(trained.parameters(), before.parameters(), strict=True)]
    assert 0 < max(change) < 1e-2
