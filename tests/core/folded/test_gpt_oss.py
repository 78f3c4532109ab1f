"""Folders of gpt-oss as they were published, in MXFP4, against transformers' reading of its blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from tests.compress.conftest import write_recipe
from tests.core.folded.test_families import CASES, save

EXPERTS = 6
SIZES = {"gate_up_proj": (128, 64), "down_proj": (64, 64)}  # rows and inputs of an expert


def published(folder: Path, tokenizer: Path) -> dict[str, Tensor]:
    """A folder as gpt-oss was published; its tensors with experts as transformers makes them floating."""
    kind, changes, _ = CASES["gpt_oss"]
    save(folder, tokenizer, kind, changes | {"hidden_size": 64, "intermediate_size": 64})
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(path)
    whole, generator = dict(tensors), torch.Generator().manual_seed(0)
    for layer in range(4):
        for name, (rows, inputs) in SIZES.items():
            stack = f"model.layers.{layer}.mlp.experts.{name}"
            shape = (EXPERTS, rows, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 126, shape, generator=generator, dtype=torch.uint8)
            whole[stack] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert whole[stack].shape == tensors.pop(stack).shape
            tensors |= {f"{stack}_blocks": blocks, f"{stack}_scales": scales}
    save_file(tensors, path, {"format": "pt"})
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"quantization_config": {"quant_method": "mxfp4"}}))
    return whole


def test_blocks_are_read_as_transformers_reads_them(tmp_path: Path, tiny_checkpoint: Path) -> None:
    whole = published(tmp_path / "hf", tiny_checkpoint)
    packed = import_model(str(tmp_path / "hf"), tmp_path / "packed")
    other = tmp_path / "floating"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    del values["quantization_config"]
    (other / "config.json").write_text(json.dumps(values))
    save_file({name: x.contiguous() for name, x in whole.items()}, other / "model.safetensors", {"format": "pt"})
    floating = import_model(str(other), tmp_path / "out")
    found, expected = (load_file(folder / "model.safetensors") for folder in (packed, floating))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_experts_become_int8(tmp_path: Path, tiny_checkpoint: Path) -> None:
    published(tmp_path / "hf", tiny_checkpoint)
    source = import_model(str(tmp_path / "hf"), tmp_path / "out")
    artifact = run_recipe(write_recipe(tmp_path, source, tmp_path / "int8"), ["steps.0.transform.search_steps=4"])
    verify_artifact(artifact)
    tokens = torch.arange(64).view(1, -1) * 5 % 320
    with torch.no_grad():
        whole, rounded = load_model(source).model(tokens), load_model(artifact).model(tokens)
    # Of most tokens: for some a router chooses another expert.
    error_T = (whole - rounded).square().mean(-1).sqrt()
    assert float(error_T.median()) < 0.15 * float(whole.std())


@pytest.mark.parametrize(
    ("leaf", "shape", "message"),
    [
        ("blocks", (EXPERTS, 128, 2, 8), r"\(experts, rows, groups, 16\) and one for each group, are needed"),
        ("scales", (EXPERTS, 128, 3), "and one for each group, are needed"),
        ("blocks", (EXPERTS, 120, 2, 16), "and one for each group, are needed"),
        ("blocks", (EXPERTS - 1, 128, 2, 16), "config.json names 6 experts"),
        ("bias", (EXPERTS + 1, 128), "config.json names 6 experts"),
        ("bias", (), "config.json names 6 experts"),
        ("scales", None, "holds no tensor"),
        ("bias", (EXPERTS, 120), r"gate_proj\.bias has the shape \(60,\)"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(
    leaf: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    published(tmp_path / "hf", tiny_checkpoint)
    path, name = tmp_path / "hf" / "model.safetensors", f"model.layers.2.mlp.experts.gate_up_proj_{leaf}"
    tensors = load_file(path)
    old = tensors.pop(name)
    if shape is not None:
        tensors[name] = torch.zeros(shape, dtype=old.dtype)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_blocks_that_are_no_bytes_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    published(tmp_path / "hf", tiny_checkpoint)
    path, name = tmp_path / "hf" / "model.safetensors", "model.layers.2.mlp.experts.down_proj_blocks"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].float()}, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"bytes, .* are needed"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")


def test_other_quantizations_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    published(tmp_path / "hf", tiny_checkpoint)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InputError, match="quant_method is 'gptq'; of gpt_oss mxfp4 is read"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
