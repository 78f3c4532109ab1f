"""Folders of folded families that other programs quantized: their integers stay where rows alone move."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.foreign.layer import Grouped
from penjing.core.imports.importer import import_model
from penjing.core.runtime.quantized import dequantized
from penjing.core.runtime.schemes import quantized_modules
from tests.core.folded.test_families import CASES, LONGROPE, save
from tests.core.foreign.folders import AWQ, GPTQ, Tensors, awq, compressed, gptq, packed, plain, random_layer

Pack = Callable[[Grouped], Tensors]
WIDE = {"hidden_size": 64, "intermediate_size": 96}
IDS = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(1))
W8A8 = compressed("int-quantized", num_bits=8, strategy="channel", group_size=None)
W8A8["config_groups"]["group_0"]["input_activations"] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
KEPT = {  # what moves and what is multiplied
    "gemma3": "norms and the embedding alone",
    "gemma2": "queries",
    "granite": "queries, and what attention and MLP add",
    "phi3_longrope_partial": "parts of fused matrices, dimensions that stand still",
    "glm4": "dimensions that rotate together, half of a fused matrix",
    "exaone4": "nothing but names",
    "olmo3": "nothing but names",
    "lfm2_bias": "nothing but names, in convolutions too",
    "qwen3_moe": "nothing: it is not folded, and has experts",
    "olmoe": "names of experts",
    "minimax_m2": "names of experts, dimensions that stand still",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}


def write(
    folder: Path, tokenizer: Path, case: str, quantization: dict[str, Any], pack: Pack, bits: int = 4, size: int = 32
) -> tuple[Any, Tensors]:
    """A folder of random integers, transformers' network of what they stand for, and these weights."""
    kind, changes, _ = CASES.get(case, ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}, ""))
    if case == "phi3_longrope_partial":  # four pairs of the wider heads rotate
        factors = {name: LONGROPE[name][:4] for name in ("short_factor", "long_factor")}
        changes = changes | {"rope_parameters": changes["rope_parameters"] | factors}
    reference = save(folder, tokenizer, kind, changes | WIDE)
    tensors, floating = load_file(folder / "model.safetensors"), Tensors()
    for index, (name, weight) in enumerate(list(tensors.items())):
        apart = name.endswith((".gate.weight", "router.weight", "router.layer.weight")) or "embed" in name
        if weight.dim() != 2 or apart or "lm_head" in name or weight.shape[1] % 32:
            continue
        symmetric = bits == 8
        layer = random_layer(weight, bits, size or weight.shape[1], symmetric=symmetric, ordered=False, seed=index)
        floating[name] = layer.dequantize()
        module = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{module}.{leaf}": each for leaf, each in pack(layer).items()}
        if pack is gptq:  # AutoGPTQ gives each layer a bias
            tensors.setdefault(f"{module}.bias", torch.zeros(len(weight)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    reference.load_state_dict(floating, strict=False)
    return reference, floating


@pytest.mark.parametrize(("quantization", "pack"), [(AWQ, awq), (GPTQ, gptq)], ids=["awq", "gptq"])
@pytest.mark.parametrize("case", ["lfm2", "phi"])
def test_floating_weights_are_those_of_transformers(
    quantization: dict[str, Any], pack: Pack, case: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    reference, floating = write(tmp_path / "hf", tiny_checkpoint, case, quantization, pack)
    with torch.no_grad():
        expected = reference(IDS).logits
        found = load_model(import_model(str(tmp_path / "hf"), tmp_path / "out", dequantize=True)).model(IDS)
    assert len(floating) > 15
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("form", ["awq", "compressed", "w8a8"])
@pytest.mark.parametrize("case", KEPT)
def test_integers_stay(
    case: str, form: str, tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packs: dict[str, tuple[Any, ...]] = {
        "awq": (AWQ, awq),
        "compressed": (compressed(symmetric=False), packed),
        "w8a8": (W8A8, plain, 8, 0),
    }
    _, floating = write(tmp_path / "hf", tiny_checkpoint, case, *packs[form])
    if case == "qwen3_moe" and form == "w8a8":
        with pytest.raises(InputError, match="serve it as it is"):
            import_model(str(tmp_path / "hf"), tmp_path / "kept")
        return
    kept = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "kept"))
    floats = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "floats", dequantize=True))
    assert kept.quantization is not None
    linear = [name.removesuffix(".weight") for name in floats.tensor_names if name.endswith("_proj.weight")]
    schemes = quantized_modules(kept.quantization, linear)
    assert {scheme.bits for scheme in schemes.values()} == {8 if form == "w8a8" else 4}
    assert len(schemes) >= len(floating)
    for name, scheme in schemes.items():
        found, wanted = dequantized(name, scheme, kept.get), floats.get(f"{name}.weight").float()
        # A product and a sum are rounded where a factor has made scales of 24 bits of those of 11.
        torch.testing.assert_close(found, wanted, rtol=3e-7, atol=3e-7 * float(wanted.abs().max()))
    with torch.no_grad():
        expected, made = load_model(floats.folder).model(IDS), load_model(kept.folder).model(IDS).float()
    # Of most tokens: for some a router chooses another expert.
    assert float((made - expected).square().mean(-1).sqrt().median()) < 0.1 * float(expected.std())


@pytest.mark.parametrize("case", ["phi", "cohere"])
def test_integers_of_norms_that_subtract_a_mean_do_not_stay(
    case: str, tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penjing.core.cli import _run

    write(tmp_path / "hf", tiny_checkpoint, case, AWQ, awq)
    assert _run(["import", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    assert "because means of its norms go into its weights" in " ".join(capsys.readouterr().err.split())
    assert open_checkpoint(tmp_path / "out").quantization is None
