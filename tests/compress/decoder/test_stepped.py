"""4-bit weights with whole numbers for scales: their rounding, an ordinary recipe's artifact, and its exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penjing.compress.decoder.compensate import error_spread
from penjing.compress.decoder.int4 import group_range, quantize_grouped
from penjing.compress.exports import export_artifact
from penjing.compress.report.schema import read_report
from penjing.compress.rounding.stepped import SteppedWeight, quantize_stepped, quantize_stepped_compensated
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.core.runtime.fused import why_not_fused
from penjing.core.runtime.quantized import Int8Linear
from tests.compress.conftest import write_recipe
from tests.compress.decoder.test_compensate import correlated
from tests.compress.decoder.test_int4 import FOUR, draw

pytestmark = pytest.mark.xdist_group("stepped")  # what all share is made once
WHOLE = [*FOUR, 'steps.0.scales="whole"']
ABOVE = 'steps.0.zero_points=["*.down_proj"]'  # of layers in steps and, by FOUR, of one in 8 bits
UP = "model.layers.0.mlp.up_proj"


def lost(weight: Tensor, found: SteppedWeight) -> Tensor:
    return (found.dequantize() - weight).norm() / weight.norm()


def test_whole_scales_lose_about_as_much_as_floats() -> None:
    weight, importance = draw(60, 256), draw(256, seed=1).exp()
    whole, floats = quantize_stepped(weight, 32, importance), quantize_grouped(weight, 32, importance, group_range)
    errors = [((each.dequantize() - weight).square() @ importance).sum() for each in (whole, floats)]
    assert errors[0] < 1.1 * errors[1]
    assert len(whole.step_NG.unique()) > 3


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-3, 1.0, 1e30])
def test_awkward_rows_are_inside_int8(factor: float) -> None:
    weight = draw(8, 64, seed=2)
    weight[1], weight[2], weight[3] = 0.0, 0.25, -0.25
    weight[4, 0], weight[5, :32], weight[6, :32] = 40.0, weight[5, :32].abs() + 5, 0.0
    found = quantize_stepped(weight * factor, 32, torch.ones(64))
    expanded = found.stored.expand()  # checks steps and offsets
    assert int(expanded.min()) >= -127
    error = (found.dequantize() - weight * factor).norm(dim=1)
    assert (error <= 0.25 * (weight * factor).norm(dim=1)).all()
    assert torch.equal(found.dequantize()[1], torch.zeros(64))


def test_scales_times_steps_are_exact_in_float16() -> None:
    found = quantize_stepped(draw(40, 128) * 0.05, 32, torch.ones(128))
    for whole in (found.step_NG, found.offset_NG):
        product = found.scale_N1 * whole
        assert torch.equal(product.to(torch.float16).to(torch.float32), product)


def test_compensated_rounding_errs_less_on_fresh_activations_of_the_same_kind() -> None:
    weight, every = draw(24, 128, seed=1), correlated(2048, 128)
    spread, fresh = error_spread(every[:1024]), every[1024:]
    nearest = quantize_stepped(weight, 32, every[:1024].square().mean(dim=0))
    compensated = quantize_stepped_compensated(weight, 32, spread)
    errors = [float((fresh @ (weight - each.dequantize()).t()).square().sum()) for each in (compensated, nearest)]
    assert errors[0] < 0.5 * errors[1]


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-whole")
    return run_recipe(write_recipe(folder, tiny_checkpoint, folder / "tiny-whole"), WHOLE)


@pytest.fixture(scope="module")
def above(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-above")
    return run_recipe(write_recipe(folder, tiny_checkpoint, folder / "tiny-above"), [*WHOLE, ABOVE])


def test_the_artifact_says_what_it_holds_and_passes_its_gate_again(artifact: Path, tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(artifact)
    assert checkpoint.dtype(f"{UP}.weight_step") == checkpoint.dtype(f"{UP}.weight_offset") == "I8"
    rows, columns = checkpoint.get(f"{UP}.weight_shape").tolist()
    assert checkpoint.shape(f"{UP}.weight_step") == (rows, columns // 32)
    assert checkpoint.shape(f"{UP}.weight_scale") == (rows, 1)
    quantized = read_report(artifact).last.quantized
    assert quantized is not None
    assert quantized.formats["weights"].startswith(
        "int4, a scale a channel, whole steps and offsets for each 32 inputs"
    )
    assert quantized.formats["activations"] == "int8, a scale a token"
    verify_artifact(artifact, Silent())
    loaded, ids = load_model(artifact), torch.tensor([[5, 17, 40, 99]])
    assert loaded.scheme == "int4"
    layer = loaded.model.get_submodule(UP)
    assert isinstance(layer, Int8Linear)
    assert layer.packed.group == 32
    assert why_not_fused(loaded.model) in (None, "the C++ extension is not built or switched off")
    with torch.no_grad():
        wanted = load_model(tiny_checkpoint).model(ids)
        assert (loaded.model(ids) - wanted).square().mean().sqrt() < 0.5 * wanted.std()


def test_activations_of_layers_in_steps_have_zero_points(above: Path) -> None:
    checkpoint = open_checkpoint(above)
    assert checkpoint.quantization is not None
    groups = checkpoint.quantization["config_groups"].values()
    kinds = {(group["weights"]["num_bits"], group["input_activations"]["symmetric"]) for group in groups}
    assert kinds == {(4, True), (4, False), (8, True), (8, False)}
    quantized = read_report(above).last.quantized
    assert quantized is not None
    assert "of *.down_proj a scale and a zero point for each 256 inputs" in quantized.formats["activations"]
    verify_artifact(above, Silent())
    found = {
        (layer.packed.group, layer.packed.zero_points): name
        for name, layer in load_model(above).model.named_modules()
        if isinstance(layer, Int8Linear)
    }
    assert set(found) == {(32, False), (32, True), (0, True), (0, False)}
    assert found[32, True].endswith("down_proj")


@pytest.mark.parametrize("kind", ["artifact", "above"])
def test_as_compressed_tensors_it_is_the_same_integers_in_8_bits(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Which transformers reads (the export's own gate), and whose logits are equal bit by bit."""
    out, artifact = tmp_path / "compressed", request.getfixturevalue(kind)
    export_artifact(artifact, "compressed-tensors", out, force=False, progress=Silent())
    record = json.loads((out / "export.json").read_text())
    assert record["unmeasured"] == {}
    assert 0 < record["differences"][0]["mean"] < record["bound"]["value"]
    theirs, ours = load_model(out), load_model(artifact)
    assert theirs.scheme == "int8"
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs.model(ids), ours.model(ids))


def test_as_gguf_it_is_exact_in_q4_1(artifact: Path, tmp_path: Path) -> None:
    import gguf
    from gguf.quants import dequantize

    export_artifact(artifact, "gguf", tmp_path / "out.gguf", force=False, progress=Silent())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    found = tensors["blk.0.ffn_up.weight"]
    assert found.tensor_type.name == "Q4_1"
    layer = load_model(artifact).model.get_submodule(UP)
    assert isinstance(layer, Int8Linear)
    wanted = layer.packed.weight_NK.float() * layer.packed.scale_N[:, None]
    torch.testing.assert_close(
        torch.from_numpy(dequantize(found.data, found.tensor_type).copy()), wanted, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("onnx", "4-bit weights, which are not written as onnx: export --to compressed-tensors or gguf, or compress"),
        ("compressed-tensors-weights", "offsets are no zero points"),
    ],
)
def test_other_forms_are_refused_by_name(artifact: Path, tmp_path: Path, form: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        export_artifact(artifact, form, tmp_path / "out", force=False, progress=Silent())  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("weight_step", lambda t: t * 0, f"{UP}: step_NG holds values from 0 to 0"),
        ("weight_step", lambda t: t + 16, f"{UP}: step_NG holds values from .* steps are from 1 to 16"),
        ("weight_offset", lambda t: t.fill_(127), f"{UP}: an offset and 15 steps reach .*, beyond the 127"),
        ("weight_offset", lambda t: t.fill_(-128), f"{UP}: offset_NG holds -128"),
        ("weight_offset", lambda t: t.float(), f"{UP}: offset_NG is"),
        ("weight_step", lambda t: t[:, :1], f"{UP}: .*"),
        ("weight_packed", lambda t: t.to(torch.int64), f"{UP}: packed_NK8 is .* int32"),
        ("weight_shape", lambda t: t + 1, f"{UP}.weight_shape says"),
        ("weight_scale", lambda t: t[:-1], f"{UP}: scale_N has shape"),
        ("weight_offset", lambda t: None, f"{UP}.weight_offset is missing"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    artifact: Path, tmp_path: Path, ending: str, change: Callable[[Tensor], Tensor | None], message: str
) -> None:
    checkpoint = open_checkpoint(artifact)
    tensors = {name: checkpoint.get(name).clone() for name in checkpoint.tensor_names}
    made = change(tensors.pop(f"{UP}.{ending}"))
    tensors |= {} if made is None else {f"{UP}.{ending}": made}
    (tmp_path / "damaged").mkdir()
    extra = {"quantization_config": checkpoint.quantization}
    items = iter(tensors.items())
    save_checkpoint(tmp_path / "damaged", checkpoint.config, items, tokenizer_from=artifact, extra_config=extra)
    with pytest.raises(InputError, match=message):
        load_model(tmp_path / "damaged")


def test_groups_that_end_amid_a_block_of_zero_points_are_refused(above: Path, tmp_path: Path) -> None:
    shutil.copytree(above, damaged := tmp_path / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "penjing.json").unlink()
    for group in config["quantization_config"]["config_groups"].values():
        if "group_size" in group["weights"]:
            group["weights"]["group_size"] = 96
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="group_size is 96: with zero points penjing runs what divides 256"):
        load_model(damaged)


def test_groups_that_the_kernels_do_not_expand_are_refused(artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact, damaged := tmp_path / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    (damaged / "penjing.json").unlink()
    for size, message in ((64, "groups of 32 inputs, config.json says 64"), (512, "512: penjing runs at most 256")):
        weights["group_size"] = size
        (damaged / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=message):
            load_model(damaged)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps.0.weights_bits=8", "steps.0.keep_int8=[]"], 'scales="whole" is of groups of 4-bit weights'),
        (["steps.0.offsets=true"], "offsets of its own"),
        (["steps.0.activations_bits=16"], "activations of 8 bits"),
        (["steps.0.group=512"], "groups of up to 256 inputs, not 512"),
        (["steps.0.group=96", ABOVE], "group=96: with zero_points take one that divides 256"),
        (["steps.0.scales=float", ABOVE], 'zero_points need scales="whole" where weights_bits is 4'),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        run_recipe(recipe, [*WHOLE, *overrides])
