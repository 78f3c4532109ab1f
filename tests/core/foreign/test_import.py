"""`penjing import` of folders that other programs quantized: integers kept and run, or weights made floating."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest
from penjing.core.runtime.quantized import dequantized
from penjing.core.runtime.schemes import Scheme, quantized_modules
from penjing.kernels.int4_linear import ActivationBits
from penjing.serve.runner.load import load_engine
from tests.core.foreign.folders import AWQ, GPTQ, Tensors, awq, compressed, gptq, packed, plain, write
from tests.core.imports.test_importer import Recorder
from tests.serve.tiny import generate

UP = "model.layers.0.mlp.up_proj"
IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
Case = tuple[dict[str, Any], Callable[..., Any], dict[str, Any]]
KEPT: dict[str, Case] = {
    "awq": (AWQ, awq, {}),
    "awq_channel": (AWQ | {"group_size": -1, "version": "GEMM"}, awq, {"size": 0}),
    "gptq": (GPTQ, gptq, {}),
    "gptq_symmetric": (GPTQ | {"sym": True}, gptq, {"symmetric": True}),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda layer: gptq(layer, first_version=False), {}),
    "gptq_8": (GPTQ | {"bits": 8, "group_size": -1}, gptq, {"bits": 8, "size": 0, "symmetric": True}),
    "compressed": (compressed(), packed, {"symmetric": True}),
    "compressed_zeros": (compressed(symmetric=False), packed, {}),
    "compressed_8": (
        compressed(num_bits=8, strategy="channel", group_size=None),
        packed,
        {"bits": 8, "size": 0, "symmetric": True},
    ),
    "compressed_8_plain": (
        compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
        plain,
        {"bits": 8, "size": 0, "symmetric": True},
    ),
}
FLOATING: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, Any], str]] = {
    "gptq_ordered": (GPTQ | {"desc_act": True}, gptq, {"ordered": True}, "in the order of how active they are"),
    "gptq_8": (GPTQ | {"bits": 8}, gptq, {"bits": 8}, "has 8 bits and not one scale a channel around zero"),
    "small_groups": (AWQ | {"group_size": 16}, awq, {"size": 16}, "its groups begin every 16 inputs; multiples of 32"),
    "compressed_ordered": (compressed(actorder="group"), packed, {"ordered": True, "symmetric": True}, "in the order"),
}


@pytest.mark.parametrize("case", KEPT)
def test_integers_are_kept_and_run(tiny_checkpoint: Path, tmp_path: Path, case: str) -> None:
    quantization, pack, how = KEPT[case]
    weights = write(tiny_checkpoint, tmp_path / "theirs", quantization, pack, **how)
    recorder = Recorder()
    out = import_model(str(tmp_path / "theirs"), tmp_path / "ours", progress=recorder)
    assert read_manifest(out).kind == "artifact"
    assert "keep their" in recorder.notes[0] or "keep theirs" in recorder.notes[0]
    assert recorder.done == recorder.total
    checkpoint = open_checkpoint(out)
    assert checkpoint.quantization is not None
    modules = [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]
    schemes = quantized_modules(checkpoint.quantization, modules)
    assert list(schemes) == modules
    for name, scheme in schemes.items():
        assert torch.equal(dequantized(name, scheme, checkpoint.get), weights[f"{name}.weight"])
    wanted, found = _floating(tiny_checkpoint, weights)(IDS), load_model(out).model(IDS)
    assert (found - wanted).square().mean().sqrt() < (0.1 if "8" in case else 0.03) * wanted.std()
    with pytest.raises(InputError, match="has no parity record: it was imported"):
        open_decoder_artifact(out)
    assert len(generate(load_engine(out), [5, 6, 7], max_tokens=3, ignore_eos=True)) == 3


def test_activations_are_as_the_folder_has_them_or_as_asked_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """An activation in 8 bits is another computation than other engines do with such a folder: it is chosen by name."""
    for case, offsets in (("awq", True), ("compressed", False)):
        quantization, pack, how = KEPT[case]
        weights = write(tiny_checkpoint, tmp_path / case, quantization, pack, **how)
        wanted, lost = _floating(tiny_checkpoint, weights)(IDS), list[float]()
        choices: tuple[tuple[ActivationBits | None, ActivationBits], ...] = ((None, 16), (16, 16), (8, 8))
        for activations, bits in choices:
            recorder = Recorder()
            out = tmp_path / f"{case}-{activations}"
            import_model(str(tmp_path / case), out, progress=recorder, activations=activations)
            said = "activations will be bfloat16" if bits == 16 else "activations will be rounded to 8 bits"
            assert said in recorder.notes[0]
            quantized = open_checkpoint(out).quantization
            assert quantized is not None
            scheme = quantized_modules(quantized, [UP])[UP]
            assert scheme == Scheme(4, scheme.group, offsets or bits == 8, activation_bits=bits)
            lost.append(float((load_model(out).model(IDS) - wanted).square().mean()))
        assert lost[0] == lost[1] < 0.5 * lost[2]
    with pytest.raises(ConfigError, match="activations=8 is of integers that are kept"):
        import_model(str(tiny_checkpoint), tmp_path / "no", activations=8)


@pytest.mark.parametrize("case", FLOATING)
def test_what_does_not_fit_becomes_floating_and_says_why(tiny_checkpoint: Path, tmp_path: Path, case: str) -> None:
    quantization, pack, how, reason = FLOATING[case]
    weights = write(tiny_checkpoint, tmp_path / "theirs", quantization, pack, **how)
    recorder = Recorder()
    out = import_model(str(tmp_path / "theirs"), tmp_path / "ours", progress=recorder)
    assert read_manifest(out).kind == "checkpoint"
    assert "14 layers are made float32, because" in recorder.notes[0]
    assert reason in recorder.notes[0]
    _equal(out, weights)


def test_floating_weights_on_demand(tiny_checkpoint: Path, tmp_path: Path) -> None:
    weights = write(tiny_checkpoint, tmp_path / "theirs", AWQ, awq)
    import_model(str(tmp_path / "theirs"), tmp_path / "kept")
    out = import_model(str(tmp_path / "theirs"), tmp_path / "ours", dequantize=True)
    _equal(out, weights)
    with pytest.raises(ConfigError, match="not quantized: leave --dequantize out"):
        import_model(str(tiny_checkpoint), tmp_path / "no", dequantize=True)


@pytest.mark.parametrize("case", ["compressed", "compressed_8"])
def test_transformers_reads_the_same_weights(tiny_checkpoint: Path, tmp_path: Path, case: str) -> None:
    quantization, pack, how = KEPT[case]
    write(tiny_checkpoint, tmp_path / "theirs", quantization, pack, **how)
    out = import_model(str(tmp_path / "theirs"), tmp_path / "ours", dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(IDS).logits
    torch.testing.assert_close(load_model(out).model(IDS), wanted, rtol=1e-4, atol=1e-3)


def test_what_penjing_runs_need_not_be_imported(tiny_checkpoint: Path, tmp_path: Path) -> None:
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    quantization = compressed()
    quantization["config_groups"]["group_0"]["input_activations"] = activations
    weights = write(tiny_checkpoint, tmp_path / "theirs", quantization, packed, symmetric=True)
    with pytest.raises(InputError, match="serve it as it is, or make floating weights of it with --dequantize"):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    _equal(import_model(str(tmp_path / "theirs"), tmp_path / "ours", dequantize=True), weights)


def test_biases_of_zero_that_autogptq_adds_are_left_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    def add(value: float) -> Callable[[Tensors], None]:
        return lambda tensors: tensors.update({f"{UP}.bias": torch.full((96,), value)})

    write(tiny_checkpoint, tmp_path / "theirs", GPTQ, gptq, change=add(0.0))
    assert f"{UP}.bias" not in open_checkpoint(import_model(str(tmp_path / "theirs"), tmp_path / "o")).tensor_names
    write(tiny_checkpoint, tmp_path / "biased", GPTQ, gptq, change=add(1.0))
    with pytest.raises(InputError, match=r"up_proj.bias is not zero, and config.json knows no such bias"):
        import_model(str(tmp_path / "biased"), tmp_path / "o2")


def _drop(leaf: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{UP}.{leaf}")


def _set(leaf: str, new: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{UP}.{leaf}": new(tensors[f"{UP}.{leaf}"])})


ORDERED = GPTQ | {"desc_act": True}
DAMAGED: dict[str, tuple[dict[str, Any], Callable[..., Any], Callable[[Tensors], None], str]] = {
    "zeros": (AWQ, awq, _drop("qzeros"), "holds no tensor 'model.layers.0.mlp.up_proj.qzeros'"),
    "order": (ORDERED, gptq, _drop("g_idx"), r"holds no tensor 'model.layers.0.mlp.up_proj.g_idx'"),
    "order_high": (ORDERED, gptq, _set("g_idx", lambda x: x + 1), r"g_idx holds groups from 1 to 2; 64 inputs have 2"),
    "narrow": (AWQ, awq, _set("qzeros", lambda x: x[:, 1:]), r"qzeros is I32 of \[2, 11\]: I32 of 2 × 12 is needed"),
    "groups": (GPTQ | {"group_size": 64}, gptq, lambda _: None, r"qzeros is I32 of \[3, 8\]: I32 of 2 × 8 is needed"),
    "type": (GPTQ, gptq, _set("qweight", lambda x: x.float()), r"qweight is F32 of \[8, 96\]: I32 of any × any"),
    "overflow": (AWQ, awq, _set("scales", lambda x: x * 1e6), "up_proj.scales holds values that are NaN or infinite"),
    "shape": (
        GPTQ,
        gptq,
        _set("qweight", lambda x: x[:-1]),
        r"up_proj.weight has the shape \(96, 56\)",
    ),
    "packed_shape": (compressed(), packed, _set("weight_shape", lambda x: x + 8), "weight_packed is I32 of"),
    "scale": (compressed(), packed, _drop("weight_scale"), "holds no tensor 'model.layers.0.mlp.up_proj.weight'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_one_clear_error(tiny_checkpoint: Path, tmp_path: Path, case: str) -> None:
    quantization, pack, change, message = DAMAGED[case]
    how = {"symmetric": quantization["quant_method"] == "compressed-tensors", "ordered": quantization is ORDERED}
    write(tiny_checkpoint, tmp_path / "theirs", quantization, pack, change=change, **how)
    with pytest.raises(InputError, match=message):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (GPTQ | {"bits": 3}, "bits is 3; penjing reads 4 and 8"),
        (GPTQ | {"bits": 2}, "bits is 2; penjing reads 4 and 8"),
        (AWQ | {"bits": "4"}, "bits is '4'; penjing reads 4"),
        (AWQ | {"version": "marlin"}, "version is 'marlin'; penjing reads AWQ's layout 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": None}, "group_size is None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic gives layers other bits"),
        (GPTQ | {"desc_act": "yes"}, "desc_act is 'yes'"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; penjing reads awq, gptq, bitnet"),
        ({"quant_method": ["awq"]}, r"quant_method is \['awq'\]"),
        (compressed("float-quantized"), "format is 'float-quantized'; penjing reads pack-quantized"),
        (compressed(num_bits=2), "num_bits is 2; penjing reads 4 and 8"),
        (compressed(strategy="block"), "strategy 'block'"),
        (compressed(type="float"), "penjing reads integers with stored scales"),
        (compressed() | {"transform_config": {"u": 1}}, "transform_config is set"),
        (compressed() | {"ignore": ["re:.*"]}, "has a scale, but no group of quantization_config is for it"),
    ],
)
def test_what_is_not_read_is_named(
    tiny_checkpoint: Path, tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    pack = {"awq": awq, "gptq": gptq}.get(str(quantization["quant_method"]), packed)
    write(tiny_checkpoint, tmp_path / "theirs", quantization, pack, symmetric=pack is packed)
    with pytest.raises(InputError, match=message):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")


def test_a_truncated_file_and_a_config_without_its_tensors(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write(tiny_checkpoint, tmp_path / "theirs", AWQ, awq)
    file = tmp_path / "theirs/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InputError, match="not a complete safetensors file"):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    config = tmp_path / "theirs/config.json"
    (tmp_path / "theirs/model.safetensors").write_bytes((tiny_checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match="says AWQ, but no tensor is quantized"):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    write(tiny_checkpoint, tmp_path / "bare", AWQ, awq)
    values = json.loads(config.read_text())
    del values["quantization_config"]
    (tmp_path / "bare/config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"holds no tensor 'model.layers.0.self_attn.q_proj.weight'"):
        import_model(str(tmp_path / "bare"), tmp_path / "ours")


def _equal(folder: Path, weights: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensor_names) == set(weights)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.get(name), weight), name


def _floating(source: Path, weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    model = load_model(source).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model
