"""Folders of rounded weights and floating activations: transformers and our importer read the artifact's integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from transformers import AutoModelForCausalLM

from penjing.compress.decoder.int4 import quantize_grouped, whole_range
from penjing.compress.export import compressed_tensors
from penjing.compress.export.gate import measure_weights, prompt_ids
from penjing.compress.export.record import Form
from penjing.compress.export.weights_only import packed, zero_points
from penjing.compress.exports import export_artifact
from penjing.compress.run import run_recipe
from penjing.core.artifact.decoder import open_decoder_weights
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint, save_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Silent
from penjing.core.runtime.quantized import dequantized
from penjing.core.runtime.schemes import quantized_modules
from tests.compress.conftest import write_recipe
from tests.core.foreign.folders import AWQ, GPTQ, awq, gptq, write

FORM: Form = "compressed-tensors-weights"
IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.transform.search_steps=0", "guard.perplexity_ratio=9"]
EIGHT = "steps.0.keep_int8=['*.1.mlp.down_proj']"
CASES: dict[str, list[str]] = {
    "symmetric": [*FOUR, EIGHT],
    "whole": [*FOUR, EIGHT, 'steps.0.offsets="whole"'],
    "one_table": [*FOUR, "steps.0.transform.rotate=false", 'steps.0.embedding_dtype="int8"', 'steps.0.offsets="whole"'],
    "int8": ["steps.0.transform.search_steps=0", "guard.perplexity_ratio=9"],
}


def widened(checkpoint: Checkpoint) -> tuple[Decoder, dict[str, torch.Tensor]]:
    """The decoder that integers and scales stand for, in float32, and its quantized weights."""
    assert checkpoint.quantization is not None
    model = Decoder(checkpoint.config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    linears = [name.removesuffix(".weight") for name in parameters if name.endswith(("_proj.weight", "lm_head.weight"))]
    weights = {
        f"{name}.weight": dequantized(name, scheme, checkpoint.get)
        for name, scheme in quantized_modules(checkpoint.quantization, linears).items()
    }
    for name, parameter in parameters.items():
        parameter.data = weights[name] if name in weights else checkpoint.get(name).float()
    return model.eval(), weights


def floats(checkpoint: Checkpoint, folder: Path) -> Path:
    """`widened` as a folder."""
    model, _ = widened(checkpoint)
    save_checkpoint(folder, checkpoint.config, model.state_dict().items())
    return folder


def decompressed(folder: Path, module: str) -> torch.Tensor:
    """(N, K) float32: what compressed-tensors itself makes of a stored layer."""
    config = json.loads((folder / "config.json").read_text())
    groups = QuantizationConfig.model_validate(config["quantization_config"]).config_groups.values()
    schemes = [each for each in groups if isinstance(each, QuantizationScheme)]
    scheme = next((each for each in schemes if module in each.targets), schemes[0])
    checkpoint, start = open_checkpoint(folder), f"{module}."
    names = [name for name in checkpoint.tensor_names if name.startswith(start)]
    state = {name.removeprefix(start): checkpoint.get(name) for name in names}
    state["weight_scale"] = state["weight_scale"].float()  # else it computes in the type of the scales
    return PackedQuantizationCompressor.decompress(state, scheme)["weight"]


@pytest.mark.parametrize("case", CASES)
def test_others_read_the_same_weights_and_so_do_we(tiny_checkpoint: Path, tmp_path: Path, case: str) -> None:
    artifact = run_recipe(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "artifact"), CASES[case])
    out = tmp_path / "out"
    export_artifact(artifact, FORM, out, force=False, progress=Silent())
    record = json.loads((out / "export.json").read_text())
    zeros = case in ("whole", "one_table")
    if zeros:
        assert "does not load packed zero points" in record["unmeasured"]["transformers"]
    else:
        assert record["unmeasured"] == {}
        assert record["differences"][0]["between"] == ["dequantized", "transformers"]
        assert 0 < record["differences"][0]["mean"] < 1e-5
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["format"] == "pack-quantized"
    for group in quantization["config_groups"].values():
        assert group["input_activations"] is None
    if case != "int8":
        assert quantization["config_groups"]["group_0"]["weights"]["symmetric"] is not zeros

    kept = open_checkpoint(import_model(str(out), tmp_path / "back"))
    model, weights = widened(kept)
    source = open_decoder_weights(artifact)[0]
    assert source.quantization is not None
    names = [name.removesuffix(".weight") for name in weights]
    schemes = quantized_modules(source.quantization, names)
    assert len(schemes) == len(weights) == 15
    for name, scheme in schemes.items():
        assert quantized_modules(kept.quantization or {}, [name])[name].bits == scheme.bits
        if case == "one_table" and name == "lm_head":
            continue  # under another name there
        assert torch.equal(weights[f"{name}.weight"], dequantized(name, scheme, source.get)), name
    for name in names:
        assert torch.equal(decompressed(out, name), weights[f"{name}.weight"]), name
    if zeros:
        return
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(IDS).logits
        assert (model(IDS) - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(("quantization", "pack"), [(AWQ, awq), (GPTQ | {"sym": True}, gptq)], ids=["awq", "gptq"])
def test_what_was_imported_with_its_integers_goes_out_again(
    tiny_checkpoint: Path, tmp_path: Path, quantization: dict[str, Any], pack: Any
) -> None:
    weights = write(tiny_checkpoint, tmp_path / "theirs", quantization, pack, symmetric=bool(quantization.get("sym")))
    ours = import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    export_artifact(ours, FORM, tmp_path / "out", force=False, progress=Silent())
    found = open_checkpoint(import_model(str(tmp_path / "out"), tmp_path / "floats", dequantize=True))
    for name, weight in weights.items():
        assert torch.equal(found.get(name), weight), name
    with pytest.raises(InputError, match=r"export --to .*compressed-tensors-weights"):
        export_artifact(ours, "onnx", tmp_path / "no", force=False, progress=Silent())


def test_offsets_that_are_no_whole_steps_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "artifact")
    artifact = run_recipe(recipe, [*FOUR, "steps.0.offsets=true"])
    with pytest.raises(InputError, match=r"q_proj has offsets that are no whole multiples .* offsets=\"whole\""):
        export_artifact(artifact, FORM, tmp_path / "out", force=False, progress=Silent())
    with pytest.raises(InputError, match="which compressed-tensors does not have: export --to gguf, or"):
        export_artifact(artifact, "compressed-tensors", tmp_path / "out", force=False, progress=Silent())
    assert not (tmp_path / "out").exists()


def test_zero_points_are_those_of_exact_products() -> None:
    scale = torch.tensor([[0.5, 0.25, 0.0]])
    assert zero_points(scale, torch.tensor([[-7.5, 0.0, 0.0]])).tolist() == [[15, 0, 8]]  # type: ignore[union-attr]
    for offset in (-8.0, 0.5, -0.25):  # beyond 15, below 0, half a step
        assert zero_points(scale, torch.tensor([[offset, 0.0, 0.0]])) is None
    assert zero_points(scale, torch.tensor([[0.0, 0.0, 1.0]])) is None  # no scale, and an offset


def test_words_are_those_of_compressed_tensors() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    generator = torch.Generator().manual_seed(0)
    for bits, middle in ((4, 8), (8, 128)):
        codes = torch.randint(0, 2 * middle, (5, 30), generator=generator)
        assert torch.equal(packed(codes, bits), pack_to_int32((codes - middle).to(torch.int8), bits))


def test_whole_offsets_are_exact_and_lose_little_more_than_free_ones() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3], weight[4], weight[5, :32], weight[6] = 0.0, 0.25, 3e-7, weight[6].abs() + 1
    found = quantize_grouped(weight, 32, torch.ones(64), whole_range)
    assert found.offset_NG is not None
    assert zero_points(found.scale_NG, found.offset_NG) is not None
    plain = quantize_grouped(weight, 32, torch.ones(64))
    usual = slice(7, 40)
    errors = [(each.dequantize() - weight)[usual].square().sum() for each in (found, plain)]
    assert errors[0] < errors[1]
    assert (found.dequantize()[3] == 0).all()
    with pytest.raises(InputError, match="beyond float16"):
        whole_range(torch.full((1, 32), 1e5), torch.ones(32))


def test_the_gate_refuses_other_weights(tiny_int8: Path, tmp_path: Path) -> None:
    checkpoint, _ = open_decoder_weights(tiny_int8)
    ((ids, _), *_) = pairs = prompt_ids(checkpoint)
    readings = compressed_tensors.read_sequences(floats(checkpoint, tmp_path), pairs)
    measure_weights(checkpoint, "loader", readings)
    readings[0].hidden[1] = torch.ones(len(ids), 64)
    with pytest.raises(InputError, match=r"parity: loader differs from dequantized .* in layer 0"):
        measure_weights(checkpoint, "loader", readings)


def test_without_the_packages_the_record_says_so(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compressed_tensors, "can_read", lambda *_: False)
    assert _run(["export", str(tiny_int8), str(tmp_path / "out"), "--to", FORM]) == 0
    assert "pip install transformers compressed-tensors" in capsys.readouterr().err
    assert load_model(import_model(str(tmp_path / "out"), tmp_path / "back")).scheme == "int8"
