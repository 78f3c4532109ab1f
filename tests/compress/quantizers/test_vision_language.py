"""A decoder that sees in INT8: its eyes turned with the decoder, in INT8 or float32, and questions before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penjing.compress.exports import export_artifact, print_export
from penjing.compress.families.base import family
from penjing.compress.run import run_recipe
from penjing.compress.sight.parity import BOUND, measure_sight
from penjing.compress.sight.rows import read_rows
from penjing.core.artifact.base import read_report_file
from penjing.core.artifact.parity import read_parity
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.checkpoint.sight import load_sight
from penjing.core.checkpoint.vision_language import load_vision_language, vision_language_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.manifest import verify, write_manifest
from penjing.core.progress import Silent
from penjing.core.vision.sight import pictures_of
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.serve.seeing import TOKEN, encoded, picture, write_llava, write_seeing
from tests.serve.tiny import DEFAULTS, run_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    write_seeing(made, tied=True)
    for seed in range(3):
        (made / f"{seed}.png").write_bytes(encoded(picture(seed)))
    rows = [
        {"prompt": "<image>what?", "completion": " a bag", "images": [f"{seed}.png"]} for seed in range(3)
    ]  # fmt: skip
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return made


def recipe(folder: Path, output: Path, **step: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "output": str(output),
        "data": {"tokens": 256, "window": 64},
        "evaluate": {"prose_tokens": 128, "code_tokens": 0, "window": 64},
        "measure": {"rounds": 0},
        "steps": [
            {"kind": "quantize", "rounding": "nearest", "questions": [str(folder / "rows.jsonl")],
             "question_images": str(folder), **step}
        ],
    }  # fmt: skip


def test_the_decoder_of_one_that_sees_is_opened_as_a_decoder(folder: Path) -> None:
    opened, whole = open_checkpoint(folder), load_vision_language(folder)
    assert opened.config == whole.config.decoder
    for name, parameter in whole.decoder.named_parameters():
        assert torch.equal(opened.get(name), parameter)


def test_rows_behind_those_that_are_wanted_are_not_read(folder: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_text((folder / "rows.jsonl").read_text() + "neither JSON nor an image\n")
    config = vision_language_config(folder)
    assert len(read_rows(folder, config, [str(many)], folder, 2, "data.rows", Silent())) == 2
    with pytest.raises(InputError, match=r"1 of 4 rows are bad: .*many\.jsonl, line 4"):
        read_rows(folder, config, [str(many)], folder, 4, "data.rows", Silent())
    turns = [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a bag"}]
    told = {
        "data.row_images = .* is the folder": {"prompt": "<image>what?", "completion": "a bag", "images": ["none.png"]},
        r"has none; give it one, as chat_template\.jinja": {"messages": turns, "images": ["0.png"]},
    }
    for says, row in told.items():  # by settings that a recipe of compression has
        many.write_text(json.dumps(row) + "\n")
        with pytest.raises(InputError, match=says) as caught:
            read_rows(folder, config, [str(many)], folder, 4, "data.rows", Silent())
        assert "data.template" not in str(caught.value)


@pytest.mark.parametrize("form", ["onnx", "gguf", "compressed-tensors"])
def test_floats_are_told_how_they_are_exported(folder: Path, tmp_path: Path, form: Any) -> None:
    """In INT8 its decoder is written as these."""
    with pytest.raises(InputError, match="is for artifacts, which 'penjing compress' makes; export --to transformers"):
        export_artifact(folder, form, tmp_path / "out", force=False, progress=Silent())
    assert not (tmp_path / "out").exists()


def test_its_decoder_alone_is_written_in_floats(folder: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    write_seeing(ours, tied=True)
    write_manifest(ours, "checkpoint", {"command": "tests"})
    record = export_artifact(ours, "transformers", tmp_path / "out", force=False, progress=Silent())
    assert "the decoder alone, which reads text" in record.notes[0]
    assert record.differences[0].mean < 1e-5
    assert family_of(tmp_path / "out") == "decoder"


CHANGES = {"smooth_norm": 0.0, "smooth_down": 0.0, "smooth_output": 0.0}


@pytest.mark.parametrize("rotate", [True, False])
def test_its_artifact_answers_nearly_as_it_did(
    folder: Path, tmp_path: Path, rotate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"transform": CHANGES | {"rotate": rotate}, "sight": "float32"}
    artifact = run_recipe(recipe(folder, tmp_path / "int8", **step))
    verify(artifact)
    assert family_of(artifact) == "decoder"  # for whoever reads text alone
    stage = read_report_file(artifact)["stages"][-1]
    assert stage["size"]["bytes"] == sum(path.stat().st_size for path in artifact.glob("**/model.safetensors"))
    found = stage["record"]["images"]
    assert found["questions"] == 3
    assert found["logprob_difference"]["mean"] < 0.1  # above 1 where the rows are not turned with the decoder
    assert found["same_tokens"] >= 0.8
    before, after = load_model(folder), load_model(artifact)
    assert after.scheme == "int8"
    seen = rows_of_both(before, after)
    assert torch.equal(*seen) is not rotate
    torch.testing.assert_close(seen[0].norm(dim=1), seen[1].norm(dim=1), atol=1e-4, rtol=1e-4)
    answered(artifact)
    record = export_artifact(artifact, "onnx", tmp_path / "onnx", force=False, progress=Silent())
    print_export(tmp_path / "onnx", record)
    assert "the decoder alone, which reads text" in capsys.readouterr().err


@pytest.mark.parametrize("calibrated", [True, False])
def test_eyes_in_int8_see_nearly_as_they_did(folder: Path, tmp_path: Path, calibrated: bool) -> None:
    rows = folder / "calibrate.jsonl"
    rows.write_text((folder / "rows.jsonl").read_text() * 8)
    named = {"rows": [str(rows)], "row_images": str(folder)} if calibrated else {}
    step = {"transform": CHANGES | {"rotate": False}, "embedding_dtype": "int8", **named}
    artifact = run_recipe(recipe(folder, tmp_path / "int8", **step) | {"data": {"tokens": 256, "window": 16}})
    verify(artifact)
    before, after = rows_of_both(load_model(folder), load_model(artifact))
    assert float((after - before).norm() / before.norm()) < 0.02
    stage = read_report_file(artifact)["stages"][-1]
    assert stage["record"]["images"]["logprob_difference"]["mean"] < 0.1
    assert sum(each["name"].startswith("sight.") for each in stage["quantized"]["layers"]) == 13 * calibrated
    parity = {each.quantity: each for each in read_parity(artifact).differences}
    assert 0 <= parity["sight_layer_outputs"].mean < 1e-3
    assert parity["sight_rows"].mean < 0.01
    rerun = family("decoder").rerun
    assert rerun is not None
    assert {each.quantity for each in rerun(artifact, Silent())} == parity.keys()
    integers = {
        name
        for name, tensor in load_file(artifact / "sight" / "model.safetensors").items()
        if tensor.dtype == torch.int8
    }
    assert len(integers) == 13
    answered(artifact)


def learning(folder: Path, rate: float) -> dict[str, Any]:
    rows = [
        {"prompt": f"<image>what {count}?", "completion": " a bag", "images": [f"{count % 3}.png"]}
        for count in range(12)
    ]
    (folder / "taught.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return {
        "steps": 8, "batch_size": 4, "sources": [str(folder / "taught.jsonl")], "images": str(folder), "held_out": 0.5,
        "sequence_length": 32, "learning_rate": {"peak": rate}, "transform": CHANGES | {"rotate": True},
    }  # fmt: skip


@pytest.mark.parametrize("head", ["its own", "the table", pytest.param("parted", marks=pytest.mark.full)])
def test_training_in_int8_begins_with_what_was_calibrated(folder: Path, tmp_path: Path, head: str) -> None:
    """Decoder, transformer and projection. Turned, the decoder has a head of its own; else it is the embedding, which
    in INT8 does not learn, or it is rounded apart from it."""
    table = {"embedding_dtype": "int8"} if head == "the table" else {}
    taught: dict[str, Any] = learning(folder, 1e-9) | {"steps": 1, "questions": []} | table
    taught["transform"] |= {"rotate": head == "its own"}
    made = [
        run_recipe(recipe(folder, tmp_path / name, **step))
        for name, step in (
            ("calibrated", {"transform": taught["transform"], "questions": []} | table),
            ("trained", taught),
        )
    ]
    assert open_checkpoint(made[1]).config.tie_word_embeddings is (head == "the table")
    losses = read_report_file(made[1])["stages"][-1]["record"]["training"]["losses"]
    assert losses["first"]["divergence"] < 0.01
    found = [load_model(artifact) for artifact in made]
    torch.testing.assert_close(*rows_of_both(*found), atol=1e-5, rtol=1e-5)
    tokens = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(*(each.model(tokens) for each in found), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sight", ["int8", "float32"])
def test_trained_in_int8_it_learns_the_answers(folder: Path, tmp_path: Path, sight: str) -> None:
    step = learning(folder, 1e-3) | {"distill": {"logits": 0.01, "cross_entropy": 1.0}}
    artifact = run_recipe(
        recipe(folder, tmp_path / "int8", sight=sight, **step) | {"guard": {"perplexity_ratio": 10.0}}
    )
    verify(artifact)
    record = read_report_file(artifact)["stages"][-1]["record"]
    losses = record["training"]["losses"]
    assert losses["last"]["cross_entropy"] < 0.8 * losses["first"]["cross_entropy"]
    assert record["images"]["questions"] == 3
    stored = load_file(artifact / "sight" / "model.safetensors")
    assert sum(tensor.dtype == torch.int8 for tensor in stored.values()) == (13 if sight == "int8" else 0)
    eyes, begun = load_sight(artifact, open_checkpoint(artifact).config), load_vision_language(folder).vision
    assert eyes is not None
    patches = "embeddings.patch_embedding.weight"
    assert not torch.equal(eyes.vision.get_parameter(patches), begun.get_parameter(patches))  # it has learnt
    answered(artifact)


@pytest.mark.parametrize("rotate", [True, False])
def test_a_llava_becomes_integers_too(tmp_path: Path, rotate: bool) -> None:
    write_llava(tmp_path)
    (tmp_path / "0.png").write_bytes(encoded(picture(0)))
    row = json.dumps({"prompt": "<image>what?", "completion": " a bag", "images": ["0.png"]}) + "\n"
    for name, count in (("rows", 3), ("calibrate", 24)):
        (tmp_path / f"{name}.jsonl").write_text(row * count)
    named = {"rows": [str(tmp_path / "calibrate.jsonl")], "row_images": str(tmp_path)}
    step = {"transform": CHANGES | {"rotate": rotate}, **named}
    made = recipe(tmp_path, tmp_path / "int8", **step) | {"data": {"tokens": 256, "window": 16}}
    artifact = run_recipe(made)
    stage = read_report_file(artifact)["stages"][-1]
    assert stage["record"]["images"]["logprob_difference"]["mean"] < 0.1
    names = [each["name"] for each in stage["quantized"]["layers"]]
    assert {"sight.projector.linear_1", "sight.projector.linear_2"} <= set(names)
    before, after = rows_of_both(load_model(tmp_path), load_model(artifact))
    torch.testing.assert_close(before.norm(dim=1), after.norm(dim=1), atol=0.05, rtol=0.05)
    if not rotate:
        assert float((after - before).norm() / before.norm()) < 0.02
    answered(artifact)


def rows_of_both(before: LoadedModel, after: LoadedModel) -> list[Tensor]:
    sights = [model.sight for model in (before, after) if model.sight]
    return [sight.rows_of(pictures_of(sight.config, encoded(picture(1))))[0] for sight in sights]


def answered(artifact: Path) -> None:
    engine = load_engine(artifact, EngineConfig.model_validate(DEFAULTS))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    (outputs,) = run_all(engine, [Request("0", f"{TOKEN}what?", params, images=[encoded(picture(1))])]).values()
    assert outputs[-1].num_output_tokens == 4


def test_eyes_that_compute_otherwise_than_what_was_calibrated_are_refused(folder: Path, tmp_path: Path) -> None:
    artifact = run_recipe(recipe(folder, tmp_path / "int8", questions=[]))
    with pytest.raises(InputError, match="sight_layer_outputs"):
        measure_sight(artifact, BOUND.model_copy(update={"value": -1.0}))


def test_what_is_damaged_or_not_done_is_refused(folder: Path, tmp_path: Path) -> None:
    artifact = run_recipe(recipe(folder, tmp_path / "int8", questions=[]))
    weights = artifact / "sight" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        load_model(artifact)
    config = artifact / "sight" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"width": 64}))
    with pytest.raises(InputError, match="64 numbers"):
        load_sight(artifact, open_checkpoint(artifact).config)
    with pytest.raises(ConfigError, match=r"leave distill\.hidden out"):
        run_recipe(recipe(folder, tmp_path / "other", **learning(folder, 1e-3) | {"distill": {"hidden": 1.0}}))
    with pytest.raises(ConfigError, match="give the step sources = rows with images"):
        run_recipe(recipe(folder, tmp_path / "other", steps=5))
    with pytest.raises(ConfigError, match="56 pixels"):
        run_recipe(recipe(folder, tmp_path / "other", questions=["builtin:scenes-test"]))
    with pytest.raises(ConfigError, match="would teach or calibrate, and judge"):
        run_recipe(recipe(folder, tmp_path / "other", rows=[str(folder / "rows.jsonl")]))
    few = {"rows": [str(folder / "rows.jsonl")], "row_images": str(folder), "questions": []}
    with pytest.raises(ConfigError, match="tokens, and a window 64"):
        run_recipe(recipe(folder, tmp_path / "other", **few))
