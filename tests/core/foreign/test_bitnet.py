"""BitNet folders: three values a weight, as transformers multiplies them; kept, and run as they were trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights, replace_with_bitnet_linear
from transformers.utils.quantization_config import BitNetQuantConfig

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest
from penjing.core.runtime.quantized import dequantized
from penjing.core.runtime.schemes import Scheme, quantized_modules
from penjing.serve.runner.load import load_engine
from tests.core.folded.served import close, served
from tests.core.folded.test_families import SMALL
from tests.core.imports.test_importer import Recorder
from tests.serve.tiny import generate

IDS = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(1))
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
UP = "model.layers.0.mlp.up_proj"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("bitnet", {"linear_class": "autobitlinear", "quantization_mode": "offline"}),
    "online": ("bitnet", {"linear_class": "autobitlinear", "quantization_mode": "online"}),
    "llama": ("llama", {"linear_class": "bitlinear"}),
}


@pytest.fixture(autouse=True)
def no_compiler() -> Any:
    """transformers compiles three lines of it; here they run as they are written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def write(folder: Path, tokenizer: Path, case: str, **changes: Any) -> Any:
    """A random network of transformers with BitNet's layers, and its folder as it is published."""
    kind, quantization = KINDS[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | WIDE | changes))
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = 1.0 if "norm" in name else 0.0
            parameter.copy_(plain + torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.15))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    floats = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    replace_with_bitnet_linear(model, ["lm_head"], BitNetQuantConfig(**quantization))
    stored = load_file(folder / "model.safetensors")
    for name, layer in model.named_modules():
        if isinstance(layer, AutoBitLinear | BitLinear):
            weight = floats[f"{name}.weight"]
            scale = weight.abs().mean()
            ternary = (weight / scale).round().clamp(-1, 1)
            if getattr(layer, "online_quant", False):
                layer.weight.data = weight
                continue
            stored[f"{name}.weight"] = pack_weights(ternary.clone())
            if isinstance(layer, BitLinear):
                layer.dtype, scale = torch.float32, 1 / scale
                layer.register_buffer("weight", stored[f"{name}.weight"])
            else:
                layer.weight.data = ternary
            layer.weight_scale = stored[f"{name}.weight_scale"] = scale.view(1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    change(folder, quantization_config={"quant_method": "bitnet", **quantization})
    return model.eval()


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def ternary_of(folder: Path) -> tuple[Scheme, Tensor]:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization is not None
    scheme = quantized_modules(checkpoint.quantization, [UP])[UP]
    return scheme, dequantized(UP, scheme, checkpoint.get)


@pytest.mark.parametrize("case", KINDS)
def test_logits_and_answers_are_those_of_transformers(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = write(tmp_path / "theirs", tiny_checkpoint, case)
    recorder = Recorder()
    out = import_model(str(tmp_path / "theirs"), tmp_path / "ours", progress=recorder)
    assert read_manifest(out).kind == "artifact"
    assert "14 layers of three values keep them, in 4 bits, steps of 1 in groups of 32" in recorder.notes[0]
    assert recorder.done == recorder.total
    scheme, weight = ternary_of(out)
    assert scheme == Scheme(4, 32, steps=True)
    scale = weight.abs().max()
    assert set((weight / scale).unique().tolist()) == {-1.0, 0.0, 1.0}
    with torch.no_grad():
        expected, found = reference(IDS).logits, load_model(out).model(IDS)
    apart = (found - expected).abs()
    assert apart.median() < 1e-4 * expected.std()  # a rounding may fall to the other side
    assert apart.square().mean().sqrt() < 0.02 * expected.std()
    scores = expected.log_softmax(-1)[0, :-1].gather(1, IDS[0, 1:, None])[:, 0]
    assert (served(out, IDS) - scores).abs().median() < 0.01
    assert len(generate(load_engine(out), [5, 6, 7], max_tokens=3, ignore_eos=True)) == 3


def test_made_floating_it_is_the_network_without_rounded_activations(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = write(tmp_path / "theirs", tiny_checkpoint, "packed")
    kept = import_model(str(tmp_path / "theirs"), tmp_path / "kept")
    out = import_model(str(tmp_path / "theirs"), tmp_path / "floats", dequantize=True)
    weight = open_checkpoint(out).get(f"{UP}.weight")
    assert torch.equal(weight, ternary_of(kept)[1])
    with torch.no_grad():
        for layer in reference.modules():
            if isinstance(layer, AutoBitLinear):
                layer.weight.data *= layer.weight_scale
                layer.forward = torch.nn.Linear.forward.__get__(layer)
        expected = reference(IDS).logits[0, :-1].log_softmax(-1).gather(1, IDS[0, 1:, None])[:, 0]
    close(served(out, IDS), expected)


def test_widths_that_no_group_divides_stay_in_bytes(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = write(tmp_path / "theirs", tiny_checkpoint, "packed", intermediate_size=72)
    recorder = Recorder()
    out = import_model(str(tmp_path / "theirs"), tmp_path / "ours", progress=recorder)
    assert "three values keep them, in 8 bits" in recorder.notes[0]
    assert ternary_of(out)[0] == Scheme(8)
    with torch.no_grad():
        expected = reference(IDS).logits
        assert (load_model(out).model(IDS) - expected).abs().median() < 1e-4 * expected.std()


def test_activations_in_16_bits_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    write(tmp_path / "theirs", tiny_checkpoint, "packed")
    import_model(str(tmp_path / "theirs"), tmp_path / "eight", activations=8)
    with pytest.raises(ConfigError, match="was trained with activations of 8 bits"):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours", activations=16)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"linear_class": "trilinear"}, "linear_class is 'trilinear'; penjing reads bitlinear and autobitlinear"),
        ({"use_rms_norm": True}, "use_rms_norm puts a norm before each linear layer"),
        ({"linear_class": "bitlinear", "quantization_mode": "online"}, "'online' is of linear_class 'autobitlinear'"),
        ({"modules_to_not_convert": ["lm_head", "up_proj"]}, "modules_to_not_convert is"),
    ],
)
def test_other_variants_are_refused_by_name(
    values: dict[str, Any], said: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    write(tmp_path / "theirs", tiny_checkpoint, "packed")
    quantization = {"quant_method": "bitnet", **KINDS["packed"][1], **values}
    change(tmp_path / "theirs", quantization_config=quantization)
    with pytest.raises(InputError, match=said):
        import_model(str(tmp_path / "theirs"), tmp_path / "ours")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (f"{UP}.weight", torch.full((24, 64), 255, dtype=torch.uint8), "stand for none of -1, 0 and 1"),
        (f"{UP}.weight", torch.zeros(24, 64), "is F32 of .*: U8 of any × any is needed"),
        (f"{UP}.weight", torch.ones(23, 64, dtype=torch.uint8), "has the shape"),
        (f"{UP}.weight_scale", torch.tensor([0.0]), "is 0, which gives no scale of weights"),
        (f"{UP}.weight_scale", torch.tensor([torch.nan]), "NaN or infinite"),
        (f"{UP}.weight_scale", torch.ones(2), "F16 or BF16 or F32 of 1 is needed"),
        (f"{UP}.weight_scale", None, "up_proj.weight has the shape"),
    ],
)
def test_damaged_layers_are_refused_by_name(
    name: str, tensor: Tensor | None, said: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    folder = tmp_path / "theirs"
    write(folder, tiny_checkpoint, "packed")
    stored = load_file(folder / "model.safetensors")
    del stored[name]
    save_file(stored | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=said):
        import_model(str(folder), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("scale", [-1.0, 0.0, 2.0**-140])  # the inverse of the last is infinite
def test_a_scale_that_divides_is_one_of_weights(scale: float, tmp_path: Path, tiny_checkpoint: Path) -> None:
    folder = tmp_path / "theirs"
    write(folder, tiny_checkpoint, "llama")
    stored = load_file(folder / "model.safetensors") | {f"{UP}.weight_scale": torch.tensor([scale])}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=f"weight_scale is {scale:g}, which gives no scale of weights"):
        import_model(str(folder), tmp_path / "ours")
