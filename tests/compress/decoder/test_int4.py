"""Four-bit weights: their rounding beside the definitions, and the artifact that an ordinary recipe makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penjing.compress.decoder.compensate import error_spread
from penjing.compress.decoder.int4 import (
    RATIOS,
    group_range,
    group_scale,
    quantize_grouped,
    quantize_grouped_compensated,
)
from penjing.compress.decoder.smooth_search import RoundingNoise
from penjing.compress.export.gate import sequences
from penjing.compress.exports import export_artifact
from penjing.compress.report.schema import read_report
from penjing.compress.rounding import descent
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.core.runtime.fused import why_not_fused
from penjing.core.runtime.quantized import Int8Linear
from penjing.kernels.int4_linear import unpack_int4
from tests.compress.conftest import write_recipe
from tests.compress.decoder.test_compensate import correlated

pytestmark = pytest.mark.xdist_group("int4")  # what all share is made once
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.keep_int8=['*.1.mlp.down_proj']"]
FOUR += ["guard.perplexity_ratio=9", "steps.0.transform.search_steps=8"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss(weight: Tensor, scale: Tensor, importance: Tensor) -> Tensor:
    wide = scale.float()[:, None]
    return ((weight - (weight / wide).round().clamp(-8, 7) * wide).square() * importance).sum(dim=1)


def test_the_scale_of_a_group_loses_no_more_than_any_on_a_fine_grid() -> None:
    weight, importance = draw(50, 32), draw(32, seed=1).exp()
    found = loss(weight, group_scale(weight, importance).scale_N, importance)
    largest = weight.abs().amax(dim=1)
    grid = torch.stack([loss(weight, (largest * ratio).bfloat16(), importance) for ratio in RATIOS])
    assert (found <= grid.amin(dim=0) * (1 + 1e-5)).all()
    assert found.sum() < 0.9 * grid[0].sum()  # clipping and the refinement gain something


@pytest.mark.parametrize("factor", [0.0, 1e-42, 1e-30, 1e30])
def test_awkward_groups_have_usable_scales(factor: float) -> None:
    weight = draw(6, 64, seed=2)
    weight[3] *= factor
    quantized = quantize_grouped(weight, 32, torch.ones(64))
    assert torch.isfinite(quantized.scale_NG).all()
    assert (quantized.scale_NG != 0).all()
    error = (quantized.dequantize() - weight).norm(dim=1)
    assert (error <= 0.15 * weight.norm(dim=1) + 1e-36).all()


def on_a_grid(rows: int, columns: int) -> Tensor:
    """What llama.cpp's Q4_1 makes of random weights, by the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType.Q4_1
    return torch.from_numpy(dequantize(quantize(draw(rows, columns).numpy(), kind), kind).copy())


def test_weights_that_lie_on_a_grid_of_q4_1_are_kept() -> None:
    weight = on_a_grid(30, 128)
    nearest = quantize_grouped(weight, 32, torch.ones(128), group_range)
    compensated = quantize_grouped_compensated(weight, 32, error_spread(correlated(300, 128)), group_range)
    for kept in (nearest, compensated):
        assert (kept.dequantize() - weight).abs().max() < 1e-5
    without = quantize_grouped(weight, 32, torch.ones(128))
    assert (without.dequantize() - weight).norm() > 0.05 * weight.norm()


def test_offsets_lose_less_and_awkward_groups_have_usable_ones() -> None:
    weight, importance = draw(50, 64), draw(64, seed=1).exp()
    weight[3], weight[4], weight[5, :32] = 0.0, 0.25, 3e-7
    with_offsets = quantize_grouped(weight, 32, importance, group_range)
    without = quantize_grouped(weight, 32, importance)
    assert with_offsets.offset_NG is not None
    errors = [((each.dequantize() - weight).square() @ importance).sum() for each in (with_offsets, without)]
    assert errors[0] < 0.95 * errors[1]
    assert torch.equal(with_offsets.dequantize()[3:5], weight[3:5])
    assert (with_offsets.scale_NG > 0).all()
    assert torch.isfinite(with_offsets.offset_NG).all()


def test_a_weight_beyond_float16_has_no_offset() -> None:
    with pytest.raises(InputError, match="beyond float16"):
        group_range(torch.full((1, 32), 1e5), torch.ones(32))


def test_compensated_rounding_errs_less_on_fresh_activations_of_the_same_kind() -> None:
    weight, every = draw(24, 128, seed=1), correlated(2048, 128)
    spread, fresh = error_spread(every[:1024]), every[1024:]
    nearest = quantize_grouped(weight, 32, every[:1024].square().mean(dim=0))
    compensated = quantize_grouped_compensated(weight, 32, spread)
    errors = [float((fresh @ (weight - each.dequantize()).t()).square().sum()) for each in (compensated, nearest)]
    assert errors[0] < 0.5 * errors[1]
    assert compensated.weight_NK.min() >= -8
    assert compensated.weight_NK.max() <= 7


def test_compensated_rounding_equals_the_papers_algorithm_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "PASSES", 0)
    weight, x = draw(5, 64, seed=2), correlated(300, 64)
    found = quantize_grouped_compensated(weight, 32, error_spread(x))
    hessian = (x.t() @ x).double()
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64))
    left, wanted = weight.double(), torch.empty(5, 64)
    for column in range(64):
        scale = found.scale_NG[:, column // 32].double()
        wanted[:, column] = (left[:, 0] / scale).round().clamp(-8, 7)
        error = (left[:, 0] - wanted[:, column] * scale) / inverse[0, 0]
        left = (left - error[:, None] * inverse[0])[:, 1:]
        inverse = (inverse - torch.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    assert (found.weight_NK != wanted).float().mean() < 0.01  # ties of float32


def test_the_noise_of_groups_is_that_of_their_own_steps() -> None:
    x, weight, token = draw(40, 64), draw(10, 64, seed=1), torch.rand(40) + 0.5
    scale = draw(64, seed=3).exp()
    steps = (weight * scale).abs().unflatten(1, (2, 32)).amax(2)
    inputs = ((x / scale).square() * token[:, None]).sum(0).view(2, 32).sum(1)
    activations = ((x / scale).abs().amax(1).square() * token).sum() * (weight * scale).square().sum()
    wanted = activations + (127 / 7) ** 2 * (steps.square().sum(0) * inputs).sum()
    torch.testing.assert_close(RoundingNoise(x, weight, token, 32)(scale), wanted)
    torch.testing.assert_close(RoundingNoise(x, weight, token, 32, rounds=False)(scale), wanted - activations)


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-int4")
    return run_recipe(write_recipe(folder, tiny_checkpoint, folder / "tiny-int4"), FOUR)


def test_the_artifact_says_what_it_holds(artifact: Path, tiny_int8: Path) -> None:
    checkpoint = open_checkpoint(artifact)
    packed = [name for name in checkpoint.tensor_names if name.endswith("_packed")]
    assert len(packed) == 13  # of 14 in the layers, one stays in 8 bits
    assert checkpoint.dtype("model.layers.1.mlp.down_proj.weight") == "I8"
    assert checkpoint.dtype("lm_head.weight") == "I8"
    for name in packed:
        module = name.removesuffix(".weight_packed")
        rows, columns = checkpoint.get(f"{module}.weight_shape").tolist()
        assert checkpoint.shape(name) == (rows, columns // 8)
        assert checkpoint.shape(f"{module}.weight_scale") == (rows, columns // 32)
    report, eight = read_report(artifact), read_report(tiny_int8)
    quantized = report.last.quantized
    assert quantized is not None
    assert quantized.formats["weights"].startswith("int4, a scale for each 32 inputs; of lm_head and *.1.mlp")
    assert {row.format for row in quantized.layers} == {"int4", "int8"}
    assert quantized.effective_bits is not None
    assert 4.5 < quantized.effective_bits < 8
    assert report.last.size.bytes < eight.last.size.bytes
    assert load_model(artifact).scheme == "int4"


def test_the_artifact_passes_its_gate_again_and_runs_fused(artifact: Path, tiny_checkpoint: Path) -> None:
    verify_artifact(artifact, Silent())
    model, ids = load_model(artifact).model, torch.tensor([[5, 17, 40, 99]])
    assert why_not_fused(model) in (None, "the C++ extension is not built or switched off")
    with torch.no_grad():
        wanted = load_model(tiny_checkpoint).model(ids)
        assert (model(ids) - wanted).square().mean().sqrt() < 0.5 * wanted.std()


@pytest.fixture(scope="module")
def with_offsets(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-offsets")
    plain = ["steps.0.transform.rotate=false", "steps.0.transform.smooth_down=0", "steps.0.transform.smooth_output=0"]
    recipe = write_recipe(folder, tiny_checkpoint, folder / "tiny-offsets")
    return run_recipe(recipe, [*FOUR, *plain, "steps.0.offsets=true"])


def test_an_artifact_with_offsets_passes_its_gate_and_errs_less(with_offsets: Path, artifact: Path) -> None:
    verify_artifact(with_offsets, Silent())
    checkpoint = open_checkpoint(with_offsets)
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.dtype(f"{name}_offset") == checkpoint.dtype(f"{name}_scale") == "F16"
    reports = [read_report(folder).last.quantized for folder in (with_offsets, artifact)]
    assert reports[0] is not None
    assert reports[1] is not None
    assert "a scale and an offset for each 32 inputs" in reports[0].formats["weights"]
    assert reports[0].effective_bits > reports[1].effective_bits  # pyright: ignore
    model = load_model(with_offsets).model
    assert why_not_fused(model) in (None, "the C++ extension is not built or switched off")
    shutil.copytree(with_offsets, damaged := with_offsets.parent / "damaged")
    config = json.loads((damaged / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["group_size"] = 64
    (damaged / "config.json").write_text(json.dumps(config))
    (damaged / "penjing.json").unlink()
    with pytest.raises(InputError, match="group_size is 64: penjing runs 32"):
        load_model(damaged)


def test_transformers_reads_the_export_with_equal_weights(artifact: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "compressed"
    export_artifact(artifact, "compressed-tensors", out, force=False, progress=Silent())
    record = json.loads((out / "export.json").read_text())
    assert record["unmeasured"] == {}
    assert 0 < record["differences"][0]["mean"] < record["bound"]["value"]
    theirs, ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval(), load_model(out)
    linears = [layer for layer in theirs.modules() if isinstance(layer, nn.Linear)]
    assert len(linears) == 15
    for layer in linears:
        layer.quantization_scheme.input_activations = None  # pyright: ignore
    for module in ours.model.modules():  # the same integers with activations as they are
        if isinstance(module, Int8Linear):
            widened = module.packed.weight_NK.float() * module.packed.scale_N[:, None]
        elif hasattr(module, "packed"):
            scale = module.packed.scale_NG.float().repeat_interleave(32, dim=1)  # type: ignore[union-attr]
            widened = unpack_int4(module.packed.packed_NK8).float() * scale  # type: ignore[union-attr]
        else:
            continue
        module.forward = lambda x, weight=widened: nn.functional.linear(x, weight)  # type: ignore[method-assign]
    ids = torch.tensor([sequences(open_decoder_artifact(artifact))[0][0]])
    with torch.no_grad():
        wanted, found = theirs(ids).logits, ours.model(ids)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_activations_in_bfloat16(tiny_checkpoint: Path, artifact: Path, tmp_path: Path) -> None:
    """The artifact is compressed-tensors' W4A16 as other engines have it, and nearer to the model than W4A8."""
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "half")
    half = run_recipe(recipe, [*FOUR, "steps.0.activations_bits=16"])
    verify_artifact(half, Silent())
    groups = (open_checkpoint(half).quantization or {})["config_groups"]
    assert groups["group_0"]["input_activations"] is None
    assert groups["group_0"]["weights"]["num_bits"] == 4
    quantized = read_report(half).last.quantized
    assert quantized is not None
    assert quantized.formats["activations"].startswith("bfloat16, where weights have 8 bits int8")
    eights = read_report(artifact).last.quantized
    assert eights is not None
    errors = [sum(row.output for row in each.layers if row.format == "int4") for each in (quantized, eights)]
    assert errors[0] < errors[1]
    export_artifact(half, "compressed-tensors", tmp_path / "out", force=False, progress=Silent())
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["unmeasured"] == {}


def test_onnx_is_refused_by_name(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="4-bit weights, which are not written as onnx"):
        export_artifact(artifact, "onnx", tmp_path / "out", force=False, progress=Silent())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps.0.group=128"], "group=128 does not divide the 64 inputs of .*q_proj; take group=32 or 64"),
        (["steps.0.group=48"], "group"),
        (["steps.0.keep_int8=['nothing']"], "keep_int8: 'nothing' matches no linear layer"),
        (["steps.0.weights_bits=8", "steps.0.keep_int8=['*']"], "keep_int8 says what stays"),
        (["steps.0.weights_bits=8", "steps.0.offsets=true"], "offsets are of groups of 4-bit weights"),
        (["steps.0.weights_bits=8", "steps.0.activations_bits=16"], "activations_bits=16 is of layers of 4-bit"),
        (["steps.0.weights_bits=3"], "weights_bits"),
        (["steps.0.effective_bits=9", "steps.0.sensitivity=x"], "effective_bits is a budget above 8 bits"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, overrides: list[str], message: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        run_recipe(recipe, ["steps.0.weights_bits=4", *overrides])
    assert not (tmp_path / "out").exists()
