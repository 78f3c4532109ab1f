"""The vision transformer of a decoder that sees gets smaller: what is left is the network with these rows and columns
deleted, chosen and judged by questions about images where a recipe names some."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penjing.compress.run import run_recipe
from penjing.core.artifact.base import read_report_file
from penjing.core.checkpoint.vision_language import (
    load_vision_language,
    save_vision_language,
)
from penjing.core.errors import ConfigError, InputError
from penjing.core.vision.vision_language import VisionLanguage
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.serve.seeing import ROWS, TOKEN, TOKEN_ID, encoded, picture, write_asked, write_llava, write_seeing
from tests.serve.tiny import DEFAULTS, run_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    write_seeing(made, tied=True)
    write_asked(made, "rows.jsonl", range(8))
    write_asked(made, "asked.jsonl", range(8, 12))
    return made


def loaded(folder: Path) -> Any:
    return load_vision_language(folder)


def values(folder: Path, output: Path, *steps: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "output": str(output),
        "data": {"tokens": 128, "window": 16, "rows": [str(folder / "rows.jsonl")], "row_images": str(folder)},
        "evaluate": {"questions": [str(folder / "asked.jsonl")], "question_images": str(folder)},
        "measure": {"rounds": 0}, "guard": {"accuracy_points": 100.0}, "steps": list(steps), **sections,
    }  # fmt: skip


def prune(*parts: str, **settings: Any) -> dict[str, Any]:
    return {"kind": "prune", "method": "l1", "parts": list(parts), "ratio": 0.5, "round_to": 1, **settings}


def kept(record: dict[str, Any], name: str) -> torch.Tensor:
    """The units of a group that stayed, by the name of the group."""
    (row,) = (row for row in record["groups"] if row["name"].startswith(name))
    return torch.tensor([unit for unit in range(row["before"]) if unit not in row["removed"]])


def keep_rows(layer: nn.Linear, rows: torch.Tensor) -> None:
    layer.weight, layer.bias = nn.Parameter(layer.weight[rows]), nn.Parameter(layer.bias[rows])


def keep_columns(layer: nn.Linear, columns: torch.Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight[:, columns])


def cut_by_hand(whole: Any, record: dict[str, Any], *, ffn: bool, heads: bool) -> Any:
    """Transformers' own network without what the record says that left its vision transformer."""
    model = copy.deepcopy(whole)
    for number, layer in enumerate(model.model.vision_model.encoder.layers):
        prefix = f"vision.encoder.layers.{number}."
        if ffn:
            units = kept(record, f"{prefix}mlp.fc1")
            keep_rows(layer.mlp.fc1, units)
            keep_columns(layer.mlp.fc2, units)
        if heads:
            attention, units = layer.self_attn, kept(record, f"{prefix}self_attn")
            places = (units[:, None] * attention.head_dim + torch.arange(attention.head_dim)).flatten()
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                keep_rows(projection, places)
            keep_columns(attention.out_proj, places)
            attention.num_heads, attention.embed_dim = len(units), len(places)
    return model


def logits(model: Any, tokens: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if isinstance(model, VisionLanguage):
            return model(tokens, images)
        return model(input_ids=tokens, pixel_values=images[None]).logits


@pytest.mark.parametrize(
    ("parts", "layout"),
    [(("vision_ffn",), "idefics3"), (("vision_heads",), "penjing_sight"), (("vision_ffn", "vision_heads"), "")],
)
def test_what_is_left_is_transformers_network_with_the_same_rows_and_columns_deleted(
    folder: Path, tmp_path: Path, parts: tuple[str, ...], layout: str
) -> None:
    from transformers import Idefics3ForConditionalGeneration

    out = run_recipe(values(folder, tmp_path / "out", prune(*parts)))
    small, config = loaded(out), json.loads((out / "config.json").read_text())
    record = read_report_file(out)["stages"][1]["record"]
    whole = Idefics3ForConditionalGeneration.from_pretrained(folder).eval()
    theirs = cut_by_hand(whole, record, ffn="vision_ffn" in parts, heads="vision_heads" in parts)
    tokens, images = torch.tensor([[5, *[TOKEN_ID] * ROWS, 6]]), torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(logits(small, tokens, images), logits(theirs, tokens, images), atol=1e-5, rtol=1e-5)
    vision = small.config.vision
    assert vision.intermediate_size == (12 if "vision_ffn" in parts else 24)
    assert vision.attention_size == (8 if "vision_heads" in parts else 16)
    if layout:
        assert config["model_type"] == layout
    if layout == "idefics3":
        read = Idefics3ForConditionalGeneration.from_pretrained(out).eval()
        torch.testing.assert_close(logits(small, tokens, images), logits(read, tokens, images), atol=1e-5, rtol=1e-5)
    sizes = [stage["size"]["parameters"] for stage in read_report_file(out)["stages"]]
    assert sizes[1] == sum(parameter.numel() for parameter in small.parameters()) < sizes[0]


def test_layers_may_keep_unlike_widths_and_a_decoder_gets_narrower_with_its_eyes(folder: Path, tmp_path: Path) -> None:
    ratios = {"vision.encoder.layers.0.mlp.fc1": 0.5, "decoder.model.layers.*.mlp.gate_proj": 0.25}
    step = prune("vision_ffn", "ffn", ratio=None, ratios=ratios)
    out = run_recipe(values(folder, tmp_path / "out", {name: each for name, each in step.items() if each is not None}))
    small = loaded(out)
    assert small.config.vision.intermediate_sizes == (12, 24)
    assert small.config.decoder.intermediate_size == 36
    whole = loaded(folder)
    record = read_report_file(out)["stages"][1]["record"]
    for network, prefix, names in (
        (whole.vision.encoder.layers[0].mlp, "vision.encoder.layers.0.mlp.fc1", ("fc1", "fc2")),
        (whole.decoder.model.layers[0].mlp, "decoder.model.layers.0.mlp.gate_proj", ("gate_proj", "down_proj")),
    ):
        units = kept(record, prefix)
        cut = small.get_submodule(prefix.rpartition(".")[0])
        assert torch.equal(cut.get_submodule(names[0]).weight, network.get_submodule(names[0]).weight[units])
        assert torch.equal(cut.get_submodule(names[1]).weight, network.get_submodule(names[1]).weight[:, units])


def test_llava_loses_heads_beside_its_class_token(tmp_path: Path) -> None:
    write_llava(llava := tmp_path / "llava")
    sections = {"data": {"tokens": 128, "window": 16}, "guard": {"perplexity_ratio": 10.0}}
    sections["evaluate"] = {"prose_tokens": 128, "code_tokens": 0, "window": 32}
    out = run_recipe(values(llava, tmp_path / "out", prune("vision_heads", "vision_ffn"), **sections))
    small, whole = loaded(out), loaded(llava)
    assert (small.config.vision.num_attention_heads, small.config.vision.head_dim) == (1, 8)
    record = read_report_file(out)["stages"][1]["record"]
    for number, layer in enumerate(whole.vision.encoder.layers):  # what left, at zero, is the same computation
        gone = 1 - kept(record, f"vision.encoder.layers.{number}.self_attn")
        left = torch.ones(24 if layer.mlp.fc1.out_features == 24 else layer.mlp.fc1.out_features)
        left[kept(record, f"vision.encoder.layers.{number}.mlp.fc1")] = 0
        with torch.no_grad():
            layer.self_attn.out_proj.weight[:, int(gone) * 8 : int(gone) * 8 + 8] = 0
            layer.mlp.fc2.weight[:, left.bool()] = 0
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(small.see(images), whole.see(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["activation", "taylor"])
def test_what_images_never_light_up_leaves_the_eyes(folder: Path, tmp_path: Path, method: str) -> None:
    """Channels that nothing reaches are large in their weights, so that magnitude keeps them."""
    dark = tmp_path / "dark"
    model = loaded(folder)
    with torch.no_grad():
        for layer in model.vision.encoder.layers:
            layer.mlp.fc1.weight[:6] *= 1e-3
            layer.mlp.fc1.bias[:6] = -100.0  # a GELU gives nothing
            layer.mlp.fc2.weight[:, :6] *= 20.0
    dark.mkdir()
    save_vision_language(dark, model.config, model, folder, {})
    for name in ("rows.jsonl", "asked.jsonl"):
        (dark / name).write_text((folder / name).read_text())
    found = {}
    for each in ("l1", method):
        recipe = values(dark, tmp_path / each, prune("vision_ffn", method=each, ratio=0.25))
        recipe["data"]["row_images"] = recipe["evaluate"]["question_images"] = str(folder)
        record = read_report_file(run_recipe(recipe))["stages"][1]["record"]
        found[each] = [row["removed"] for row in record["groups"]]
    assert found[method] == [list(range(6))] * 2
    assert all(set(removed).isdisjoint(range(6)) for removed in found["l1"])


def test_the_guard_judges_by_the_questions(folder: Path, tmp_path: Path) -> None:
    """Once it has learnt the answer to every question, losing nearly all channels costs answers."""
    learn = {
        "kind": "finetune", "steps": 40, "batch_size": 4, "sources": [str(folder / "rows.jsonl")],
        "images": str(folder), "sequence_length": 32, "held_out": 0.25, "learning_rate": {"peak": 5e-3},
    }  # fmt: skip
    guard = {"accuracy_points": 1.0, "against": "previous", "retries": 0, "otherwise": "skip"}
    cut = prune("vision_ffn", "vision_heads", "ffn", "heads", ratio=0.8)
    report = read_report_file(run_recipe(values(folder, tmp_path / "out", learn, cut, guard=guard)))
    first, last = (stage["quality"] for stage in report["stages"])
    assert (first["name"], first["samples"], first["value"], last["value"]) == ("accuracy", 4, 0.0, 1.0)
    learnt, left_out = report["decisions"]
    assert (learnt["outcome"], left_out["outcome"]) == ("kept", "left out")
    assert left_out["loss"] > 1.0
    assert left_out["unit"] == "accuracy points lost"


def test_pruned_taught_trained_in_int8_and_rounded_it_is_served(folder: Path, tmp_path: Path) -> None:
    """The whole chain in one recipe: eyes and decoder get smaller, learn from the whole, learn in INT8, and answer in
    the engine as many questions exactly as the recipe's own evaluation says."""
    learning = {
        "batch_size": 4, "sources": [str(folder / "rows.jsonl")], "images": str(folder), "sequence_length": 32,
        "held_out": 0.25,
    }  # fmt: skip
    whole = run_recipe(
        values(
            folder, tmp_path / "whole", learning | {"kind": "finetune", "steps": 40, "learning_rate": {"peak": 5e-3}}
        )
    )
    steps = (
        prune("vision_ffn", "vision_heads", "ffn", method="activation", ratio=0.3),
        learning | {"kind": "distill", "steps": 30, "learning_rate": {"peak": 3e-3}},
        learning
        | {
            "kind": "quantize",
            "steps": 4,
            "learning_rate": {"peak": 1e-4},
            "transform": {"rotate": False},
            "lm_head": "keep",
            "questions": [str(folder / "asked.jsonl")],
            "question_images": str(folder),
        },
    )
    artifact = run_recipe(values(folder, tmp_path / "int8", *steps, model=str(whole)))
    report = read_report_file(artifact)
    first, pruned, taught, rounded = report["stages"]
    assert first["quality"]["value"] == 1.0
    assert pruned["size"]["parameters"] == rounded["size"]["parameters"] < first["size"]["parameters"]
    assert rounded["size"]["bytes"] < 0.75 * first["size"]["bytes"]
    assert taught["record"]["losses"]["last"]["divergence"] < 0.5 * taught["record"]["losses"]["first"]["divergence"]
    assert rounded["record"]["training"]["losses"]["last"]["divergence"] < 0.05
    assert rounded["record"]["images"]["questions"] == 4
    assert rounded["record"]["images"]["exact"]["after"] == rounded["quality"]["value"]
    eyes = {layer["name"] for layer in rounded["quantized"]["layers"] if layer["name"].startswith("sight.")}
    assert {"sight.projector", "sight.vision.encoder.layers.1.mlp.fc2"} <= eyes
    engine = load_engine(artifact, EngineConfig.model_validate(DEFAULTS))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    asked = [
        Request(str(seed), f"{TOKEN}what {seed}?", params, images=[encoded(picture(seed))]) for seed in range(8, 12)
    ]
    answers = ["".join(each.text for each in outputs) for outputs in run_all(engine, asked).values()]
    assert answers.count(" a bag") == 4 * rounded["quality"]["value"]


def test_what_does_not_fit_is_refused_by_name(folder: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    rows = {"data": {"tokens": 128, "window": 16, "rows": [str(folder / "rows.jsonl")]}}
    same = values(folder, tmp_path / "out", prune("vision_ffn"))
    same["evaluate"]["questions"] = same["data"]["rows"]
    scenes = values(folder, tmp_path / "out", prune("vision_ffn", method="activation"))
    scenes["data"]["rows"] = ["builtin:scenes"]
    missing = values(folder, tmp_path / "out", prune("vision_ffn"))
    missing["data"]["rows"] = [str(folder / "nothing.jsonl")]
    plain = {"evaluate": {"prose_tokens": 128, "code_tokens": 0, "window": 32}}
    unlike = prune("vision_heads", ratio=None, ratios={"vision.encoder.layers.0.self_attn.k_proj": 0.5})
    for recipe, error, said in (
        (same, ConfigError, "would calibrate"),
        (scenes, ConfigError, "56 pixels"),
        (missing, InputError, "does not exist"),
        (values(tiny_checkpoint, tmp_path / "out", prune("ffn"), **rows, **plain), ConfigError, "data.rows"),
        (
            values(tiny_checkpoint, tmp_path / "out", prune("vision_ffn"), **plain, data={"tokens": 128, "window": 16}),
            ConfigError,
            "no 'vision_ffn'",
        ),
        (values(folder, tmp_path / "out", {k: v for k, v in unlike.items() if v is not None}), ConfigError, "as many"),
    ):
        with pytest.raises(error, match=said):
            run_recipe(recipe)
    assert loaded(folder).config.vision.intermediate_size == 24


@pytest.mark.parametrize(("section", "key", "images"), [("data", "rows", "row"), ("evaluate", "questions", "question")])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", r" \[.*\] leave nothing to learn from: 0 rows; give other data$"),
        ("{", "1 of 1 rows are bad: .*line 1: it is no JSON .*; correct them$"),
        (
            json.dumps({"prompt": f"{TOKEN}x", "completion": "y", "images": ["none.png"]}),
            r"none.png is no file; {images} = .* is the folder of images that rows name; correct",
        ),
    ],
)
def test_damaged_rows_are_refused_by_the_setting_that_names_them(
    folder: Path, tmp_path: Path, section: str, key: str, images: str, row: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(row)
    given = {key: [str(tmp_path / "rows.jsonl")], f"{images}_images": str(folder)}
    recipe = values(folder, tmp_path / "out", prune("vision_ffn", method="activation"))
    recipe[section] |= given
    message = message.replace("{images}", rf"{section}\.{images}_images")
    with pytest.raises(InputError, match=rf"^{section}\.{key}:?.*{message}"):
        run_recipe(recipe)
    assert not (tmp_path / "out").exists()
