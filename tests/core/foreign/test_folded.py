"""Folders of folded families that other programs quantized become the network of their floating weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.load import load_model
from penjing.core.imports.importer import import_model
from tests.core.folded.test_families import CASES, save
from tests.core.foreign.folders import AWQ, GPTQ, awq, gptq, random_layer


@pytest.mark.parametrize(("quantization", "pack"), [(AWQ, awq), (GPTQ, gptq)], ids=["awq", "gptq"])
@pytest.mark.parametrize("case", ["lfm2", "lfm2_bias"])
def test_convolutions_beside_quantized_layers(
    quantization: dict, pack: object, case: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    kind, changes, _ = CASES[case]
    folder = tmp_path / "hf"
    reference = save(folder, tiny_checkpoint, kind, changes | {"hidden_size": 64, "intermediate_size": 96})
    tensors, floating = load_file(folder / "model.safetensors"), {}
    for index, (name, weight) in enumerate(list(tensors.items())):
        if weight.dim() != 2 or "embed" in name or "lm_head" in name or weight.shape[1] % 32:
            continue
        layer = random_layer(weight, 4, 32, symmetric=False, ordered=False, seed=index)
        floating[name] = layer.dequantize()
        module = name.removesuffix(".weight")
        del tensors[name]
        tensors |= {f"{module}.{leaf}": each for leaf, each in pack(layer).items()}  # type: ignore[operator]
        if pack is gptq:  # AutoGPTQ gives each layer a bias
            tensors.setdefault(f"{module}.bias", torch.zeros(len(weight)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
    reference.load_state_dict(floating, strict=False)
    tokens = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        found = load_model(import_model(str(folder), tmp_path / "out")).model(tokens)
    assert len(floating) > 15
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))
