"""The artifact that an ordinary run makes of a tiny decoder: what it holds, what it keeps, how near it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penjing.compress.report.schema import read_report
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.manifest import read_manifest
from tests.compress.conftest import write_recipe
from tests.compress.decoder.plain import UP, changed_model


def test_the_artifact_is_complete_verified_and_smaller(tiny_int8: Path, tiny_checkpoint: Path) -> None:
    artifact = open_decoder_artifact(tiny_int8)
    hashed = set(artifact.manifest.sha256)
    assert {"recipe.toml", "report.json", "report.html", "parity.json", "model.safetensors", "tokenizer.json"} <= hashed
    report = read_report(tiny_int8)
    assert [stage.name for stage in report.stages] == ["00-model", "01-quantize"]
    stored = sum(artifact.checkpoint.get(name).nbytes for name in artifact.checkpoint.tensor_names)
    assert stored * 2 < 4 * report.first.size.parameters
    assert report.last.size.bytes == (tiny_int8 / "model.safetensors").stat().st_size
    assert artifact.manifest.created_by["model"] == str(tiny_checkpoint)
    assert not list(tiny_int8.parent.glob(".*"))  # no work folder, no partial one


def test_every_linear_layer_is_int8_with_a_scale_a_channel(tiny_int8: Path) -> None:
    checkpoint = open_checkpoint(tiny_int8)
    linears = [name for name in checkpoint.tensor_names if name.endswith(("_proj.weight", "lm_head.weight"))]
    assert len(linears) == 15
    for name in linears:
        assert checkpoint.dtype(name) == "I8"
        assert checkpoint.dtype(f"{name}_scale") == "F32"
        assert checkpoint.shape(f"{name}_scale") == (checkpoint.shape(name)[0], 1)
    assert checkpoint.dtype("model.embed_tokens.weight") == "F16"
    assert not checkpoint.config.tie_word_embeddings


def test_the_artifact_answers_nearly_as_the_model(tiny_int8: Path, tiny_checkpoint: Path) -> None:
    token_ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = load_model(tiny_checkpoint).model(token_ids), load_model(tiny_int8).model(token_ids)
    assert (found - wanted).square().mean().sqrt() < 0.1 * wanted.std()


def test_report_has_what_the_summary_needs(tiny_int8: Path) -> None:
    report = read_report(tiny_int8)
    for stage in report.stages:
        assert stage.quality.name == "perplexity"
        assert [part.name for part in stage.quality.parts] == ["prose", "code"]
    quantized = report.last.quantized
    assert quantized is not None
    assert len(quantized.layers) == 15
    assert all(0 < row.output < 0.2 and 0 < row.weight < 0.05 for row in quantized.layers)
    assert (quantized.effective_bits, quantized.training_steps) == (8.0, 0)
    assert [each.outcome for each in report.decisions] == ["kept"]
    assert 0 < report.last.seconds < report.seconds  # evaluation counts too
    assert report.versions["torch"] == torch.__version__
    assert report.command.startswith("penjing compress ")


def test_report_page_stands_alone(tiny_int8: Path) -> None:
    page = (tiny_int8 / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"(src|href)=\"(?!#)", page.replace('xlink:href="#', 'xlink_href="#'))
    assert "<script" not in page
    assert "model.layers.1.mlp.down_proj" in page


def test_the_recipe_in_the_artifact_makes_it_again_bit_by_bit(tiny_int8: Path, tmp_path: Path) -> None:
    again = run_recipe(tiny_int8 / "recipe.toml", out=tmp_path / "again")
    hashes, first = read_manifest(again).sha256, read_manifest(tiny_int8).sha256
    assert hashes["model.safetensors"] == first["model.safetensors"]
    assert hashes["parity.json"] == first["parity.json"]


def test_a_tied_head_that_is_kept_stays_tied(tiny_int8: Path, tmp_path: Path) -> None:
    overrides = ["steps.0.lm_head=keep", "steps.0.transform.rotate=false"]
    out = run_recipe(tiny_int8 / "recipe.toml", overrides, out=tmp_path / "out")
    checkpoint = open_checkpoint(out)
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.tensor_names
    load_model(out)


def test_layers_can_be_kept(tiny_int8: Path, tmp_path: Path) -> None:
    override = 'steps.0.keep=["*.down_proj", "model.layers.0.*"]'
    out = run_recipe(tiny_int8 / "recipe.toml", [override], out=tmp_path / "o")
    checkpoint = open_checkpoint(out)
    assert checkpoint.dtype("model.layers.1.mlp.down_proj.weight") == "F32"
    assert checkpoint.dtype("model.layers.0.mlp.up_proj.weight") == "F32"
    assert checkpoint.dtype("model.layers.1.mlp.up_proj.weight") == "I8"
    load_model(out)


def test_kept_layers_in_16_bits(tiny_int8: Path, tmp_path: Path) -> None:
    overrides = ['steps.0.keep=["*.0.mlp.down_proj"]', "steps.0.keep_dtype=float16"]
    out = run_recipe(tiny_int8 / "recipe.toml", overrides, out=tmp_path / "o")
    assert open_checkpoint(out).dtype("model.layers.0.mlp.down_proj.weight") == "F16"
    load_model(out)


def test_zero_points_are_stored_as_compressed_tensors_has_them(tiny_int8: Path, tmp_path: Path) -> None:
    out = run_recipe(tiny_int8 / "recipe.toml", ['steps.0.zero_points=["*.down_proj"]'], out=tmp_path / "o")
    groups = open_checkpoint(out).config_json["quantization_config"]["config_groups"]
    assert [group["input_activations"]["symmetric"] for group in groups.values()] == [True, False]
    assert groups["group_1"]["targets"] == [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    divided = load_file(out / "transform" / "layers.safetensors")["model.layers.0.mlp.down_proj.divided"]
    assert (divided < 0).any()  # signs
    load_model(out)


@pytest.mark.parametrize("rotate", ["false", "true"])  # one table in INT8, or two
def test_tables_in_another_basis_lose_less(
    tiny_checkpoint: Path, tmp_path: Path, rotate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed_model(tiny_checkpoint, tmp_path / "spread", _stand_out)
    sets = [f"steps.0.transform.rotate={rotate}", "steps.0.embedding_dtype=int8", "guard.perplexity_ratio=9"]
    plain, turned = (
        run_recipe(
            write_recipe(tmp_path, model, tmp_path / f"out{block}"),
            [*sets, f"steps.0.transform.hadamard_table={block}"],
        )
        for block in (0, 64)
    )
    config = open_checkpoint(turned).config
    assert (config.model_type, config.table_hadamard) == ("penjing", 64)
    assert config.tie_word_embeddings == (rotate == "false")
    every = torch.arange(config.vocab_size)
    wanted = load_model(model).model.model.embed(every)
    if rotate == "false":  # else the residual stream is in another basis, too
        errors = [(load_model(out).model.model.embed(every) - wanted).square().mean() for out in (plain, turned)]
        assert errors[1] < 0.5 * errors[0]
    ids = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, floating = load_model(turned).model(ids), load_model(model).model(ids)
    assert (ours - floating).square().mean().sqrt() < 0.1 * floating.std()
    verify_artifact(turned)
    for form in ("gguf", "compressed-tensors"):
        assert _run(["export", str(turned), str(tmp_path / "refused"), "--to", form]) == 3
        assert "transform.hadamard_table=0" in " ".join(capsys.readouterr().err.split())
    assert _run(["export", str(turned), str(tmp_path / "onnx"), "--to", "onnx"]) == 0  # its gate has compared them
    record = json.loads((turned / "parity.json").read_text())["differences"]
    (logits,) = (each["mean"] for each in record if each["quantity"] == "logits")
    assert logits < 0.05 * float(floating.std())  # of one basis


def _stand_out(tensors: dict[str, torch.Tensor]) -> None:
    table_VE = tensors["model.embed_tokens.weight"]  # in each row another channel, so that no smoothing helps
    table_VE[torch.arange(len(table_VE)), 7 * torch.arange(len(table_VE)) % table_VE.shape[1]] *= 20


def test_a_hadamard_transform_stays_in_the_network(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    out = run_recipe(recipe, ["steps.0.transform.hadamard_down=32"])
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["mlp_hadamard"]) == ("penjing", 32)
    ids = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, floating = load_model(out).model(ids), load_model(tiny_checkpoint).model(ids)
    assert (ours - floating).square().mean().sqrt() < 0.1 * floating.std()
    verify_artifact(out)
    assert _run(["export", str(out), str(tmp_path / "onnx"), "--to", "onnx"]) == 0  # its gate has compared them
    for form in ("gguf", "compressed-tensors"):
        assert _run(["export", str(out), str(tmp_path / "refused"), "--to", form]) == 3
        said = " ".join(capsys.readouterr().err.split())
        assert f"has a Hadamard transform, which {form} does not" in said
        assert "transform.hadamard_down=0" in said
        assert not (tmp_path / "refused").exists()


def test_channels_of_zeros_are_compressed_to_zeros(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][5] = 0
        tensors["model.layers.0.self_attn.v_proj.weight"].zero_()

    model = changed_model(tiny_checkpoint, tmp_path / "model", damage)
    out = run_recipe(write_recipe(tmp_path, model, tmp_path / "out"))
    checkpoint = open_checkpoint(out)
    assert not checkpoint.get(UP)[5].any()
    assert not checkpoint.get("model.layers.0.self_attn.v_proj.weight").any()
    with torch.no_grad():
        assert torch.isfinite(load_model(out).model(torch.arange(20)[None])).all()
