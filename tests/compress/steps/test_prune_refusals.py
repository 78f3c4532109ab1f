"""Budgets that are met, and what a pruning step refuses: one line that names the file or value and the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penjing.compress.families.base import family_at
from penjing.compress.preflight import check_fit
from penjing.compress.prune import budget
from penjing.compress.prune.budget import Budget
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.recipe import load_recipe
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.base import Context
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.sparsify import Sparsify
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError, PenjingError
from penjing.core.manifest import write_manifest
from penjing.core.progress import Silent
from tests.compress.conftest import Notes
from tests.compress.prune.checkpoints import decoder, prune, resnet, tokens

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(("make", "name"), [(decoder, "macs"), (resnet, "parameters"), (resnet, "bytes")])
def test_a_target_is_met_and_not_by_far(tmp_path: Path, name: str, make: Any) -> None:
    make(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "part", target={name: 0.85}, round_to=1)
    left = record[name]["after"] / record[name]["before"]
    assert 0.8 < left <= 0.85
    absolute = record[name]["after"] + 1
    again = prune(tmp_path / "dense", tmp_path / "absolute", target={name: absolute}, round_to=1)
    assert again[name]["after"] <= absolute
    with pytest.raises(InputError, match="cannot reach 1"):
        prune(tmp_path / "dense", tmp_path / "none", target={name: 0.01}, protect=["*layers.0.*"])
    with pytest.raises(ConfigError, match=f"target.{name}=.* is not below"):
        prune(tmp_path / "dense", tmp_path / "none2", target={name: record[name]["before"]})


def test_a_latency_is_met_by_the_clock(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 4096, "num_hidden_layers": 1}
    decoder(tmp_path / "dense", **sizes)
    record = prune(tmp_path / "dense", tmp_path / "pruned", tokens(), target={"latency": 0.7})
    assert record["latency"]["ratio"] < 0.9  # the clock of a busy machine: 0.7 is what was asked for
    assert 0.1 < record["share"] < 0.9


def test_a_missed_latency_is_said(tmp_path: Path, notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lucky measurement ends no search, and a target that is missed after all is said."""
    decoder(tmp_path / "dense")
    measured: list[float] = []

    def clock(dense: nn.Module, pruned: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        parts = [sum(p.numel() for p in model.parameters()) for model in (pruned, dense)]
        lucky = len(measured) in (1, 2)  # of the largest share, and of the first that could end the search
        measured.append(0.59 if lucky else 0.5 + 0.5 * parts[0] / parts[1])
        return {"dense_s": 1.0, "pruned_s": measured[-1], "ratio": measured[-1]}

    monkeypatch.setattr(budget, "latency", clock)
    monkeypatch.setattr("penjing.compress.steps.prune.latency", clock)
    step: dict[str, Any] = {"target": {"latency": 0.9}, "round_to": 1, "parts": ["ffn"]}
    record = prune(tmp_path / "dense", tmp_path / "met", tokens(), **step, progress=notes)
    assert record["latency"]["met"]
    assert not any("is missed" in line for line in notes.lines)
    step["target"] = {"latency": 0.6}
    measured.clear()
    record = prune(tmp_path / "dense", tmp_path / "missed", tokens(), **step, progress=notes)
    assert not record["latency"]["met"]
    assert record["share"] == 0.9  # as much as may leave
    assert any(line.startswith("target.latency=0.6 is missed: 0.") for line in notes.lines)


def test_a_share_that_cannot_leave_is_said(tmp_path: Path, notes: Notes) -> None:
    resnet(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "most", ratio=0.99, progress=notes)
    assert record["share_removed"] < 0.9
    assert record["share_removed"] == sum(len(row["removed"]) for row in record["groups"]) / sum(
        len(group) for group in dependency_graph(*_network(tmp_path / "dense")).groups
    )
    (line,) = [line for line in notes.lines if "was asked for" in line]
    assert line.startswith(f"a share of 0.99 of the units was asked for, {record['share_removed']:.3g} leaves")
    notes.lines.clear()
    prune(tmp_path / "dense", tmp_path / "half", ratio=0.5, progress=notes)
    assert not any("was asked for" in line for line in notes.lines)


def _network(folder: Path) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return family_at(folder).skeleton(folder).model, family_at(folder).skeleton(folder).example


NOTHING = ("no.such.*",)


@pytest.mark.parametrize(
    "step",
    [Prune(ratio=0.3, protect=("stem*", *NOTHING)), Sparsify(strength=0.1, steps=1, protect=NOTHING)],
)
def test_a_pattern_that_protects_nothing_is_refused_before_anything_runs(tmp_path: Path, step: Any) -> None:
    resnet(tmp_path / "dense")
    context = Context(tmp_path / "dense", family_at(tmp_path / "dense"), DataSettings(), Silent())
    with pytest.raises(ConfigError, match=r"protect: 'no\.such\.\*' matches no tensor of"):
        step.check(context)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ratio": 0.0}, "ratio"),
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": -0.3}, "ratio"),
        ({}, "one of ratio .* and target"),
        ({"ratio": 0.3, "target": {"macs": 0.5}}, "one of ratio .* and target"),
        ({"target": {}}, "name one of parameters"),
        ({"target": {"macs": 0.5, "bytes": 0.5}}, "got macs, bytes"),
        ({"target": {"macs": -1}}, "macs"),
        ({"ratio": 0.3, "round_to": 0}, "round_to"),
        ({"ratio": 0.3, "method": "l3"}, "method"),
        ({"ratio": 0.3, "parts": ["ffn", "layers"]}, "belong together"),
        ({"ratio": 0.3, "layers": 2}, "belong together"),
        ({"parts": ["layers"], "layers": 0}, "1 or more"),
        ({"parts": ["layers"], "layers": []}, "1 or more"),
        ({"parts": ["layers"], "layers": 2, "ratio": 0.3}, "leave them out"),
        ({"ratio": 0.3, "parts": ["ffn", "ffn"]}, "each once"),
        ({"ratio": 0.3, "parts": []}, "one or more"),
        ({"ratio": 0.3, "shares": 2}, "shares"),
    ],
)
def test_settings_that_make_no_step(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(Prune, values, "recipe.toml")


def test_one_target() -> None:
    assert Budget(latency=12.5).quantity() == ("latency", 12.5)


@pytest.mark.parametrize(
    ("make", "step", "words"),
    [
        (decoder, {"ratio": 0.3, "protect": ["*"]}, "nothing is left to prune.*; protect less"),
        (resnet, {"ratio": 0.3, "protect": ["*"]}, "nothing is left to prune.*; protect less"),
        (decoder, {"ratio": 0.3, "protect": ["mlp"]}, "'mlp' matches no tensor"),
        (decoder, {"ratio": 0.3, "protect": ["*gate_proj*"]}, "nothing of 'ffn' can leave"),
        (decoder, {"ratio": 0.1, "round_to": 32}, "nothing leaves .* round_to=32"),
        (resnet, {"ratio": 0.1, "round_to": 64}, "nothing leaves .* round_to=64"),
        (resnet, {"ratio": 0.3, "parts": ["ffn"]}, "decoders have parts, .* has none; leave them out"),
        (decoder, {"parts": ["layers"], "layers": [3]}, "3 is none of the model's layers 0 … 2"),
        (decoder, {"parts": ["layers"], "layers": [0, 1, 2]}, "leave at least one of the 3"),
        (decoder, {"parts": ["layers"], "layers": [1, 1]}, "name each once"),
        (decoder, {"ratio": 0.3, "method": "taylor"}, "needs calibration data"),
        (decoder, {"parts": ["layers"], "layers": 1}, "needs calibration data"),
        (resnet, {"target": {"latency": 0.5}}, "needs calibration data"),
    ],
)
def test_steps_that_do_not_fit(tmp_path: Path, make: Any, step: dict[str, Any], words: str) -> None:
    make(tmp_path / "dense")
    with pytest.raises(PenjingError, match=words) as caught:
        prune(tmp_path / "dense", tmp_path / "pruned", **step)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "pruned").iterdir())


def test_more_layers_than_there_are(tmp_path: Path) -> None:
    decoder(tmp_path / "dense")
    with pytest.raises(ConfigError, match="has 3, and at least one must stay"):
        prune(tmp_path / "dense", tmp_path / "pruned", tokens(), parts=["layers"], layers=3)


@pytest.mark.parametrize("layers", [3, [0, 1, 2]])
def test_more_layers_than_there_are_are_refused_before_anything_is_measured(tmp_path: Path, layers: object) -> None:
    decoder(tmp_path / "dense")
    step = {"kind": "prune", "parts": ["layers"], "layers": layers}
    recipe = load_recipe({"model": str(tmp_path / "dense"), "output": str(tmp_path / "out"), "steps": [step]})
    context = Context(recipe.model, family_at(recipe.model), recipe.data, Silent())
    with pytest.raises(ConfigError, match="dense has 3, and at least one must stay"):
        check_fit(recipe, context)


def test_one_key_value_head_stays(tmp_path: Path) -> None:
    decoder(tmp_path / "dense", num_key_value_heads=1)
    with pytest.raises(InputError, match="there is one key-value head"):
        prune(tmp_path / "dense", tmp_path / "pruned", ratio=0.5, parts=["heads"])


def test_a_layer_never_vanishes(tmp_path: Path) -> None:
    decoder(tmp_path / "dense")
    record = prune(tmp_path / "dense", tmp_path / "pruned", ratio=0.99, round_to=1, parts=["ffn", "heads", "hidden"])
    assert min(min(row["after"]) for row in record["widths"]) >= 1


MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "mixtral", "moe": MOE, "tie_word_embeddings": False}, r"experts \(moe\)"),
        (
            {"model_type": "penjing", "latent_attention": LATENT, "num_key_value_heads": 8},
            "latent attention",
        ),
    ],
)
def test_decoders_that_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    decoder(tmp_path / "dense", **changed)
    with pytest.raises(InputError, match=words):
        prune(tmp_path / "dense", tmp_path / "pruned", ratio=0.3)


LAYER = {decoder: "model.layers.1.mlp.up_proj.weight", resnet: "blocks.1.layers.0.conv.weight"}


def _damage(folder: Path, name: str, how: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors["surplus.weight"] = torch.zeros(3)
    elif how == "shape":
        tensors[name] = tensors[name][1:].contiguous()
    else:
        tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, folder / WEIGHTS)
    (folder / "penjing.json").unlink()
    write_manifest(folder, "checkpoint", {})


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "nan"])
@pytest.mark.parametrize("make", [decoder, resnet])
def test_damaged_checkpoints(tmp_path: Path, make: Any, how: str) -> None:
    make(tmp_path / "dense")
    _damage(tmp_path / "dense", LAYER[make], how)
    with pytest.raises(InputError, match="surplus.weight" if how == "extra" else LAYER[make]) as caught:
        prune(tmp_path / "dense", tmp_path / "pruned", ratio=0.3)
    assert str(tmp_path / "dense") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        prune(tmp_path / "nowhere", tmp_path / "pruned", ratio=0.3)
