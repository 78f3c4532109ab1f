"""Blocks of 4 bits: the gguf package makes of them exactly what the artifact's integers and scales say."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penjing.compress.export.record import Form
from penjing.compress.exports import export_artifact
from penjing.compress.gguf.four_bits import four_bit_blocks
from penjing.compress.run import run_recipe
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.progress import Silent
from penjing.core.runtime.quantized import dequantized
from penjing.core.runtime.schemes import quantized_modules
from penjing.kernels.int4_linear import pack_int4
from tests.compress.conftest import write_recipe

GGUF: Form = "gguf"
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.transform.search_steps=0", "guard.perplexity_ratio=9"]
Floats = NDArray[np.float32]


def codes(rows: int = 6, inputs: int = 512) -> torch.Tensor:
    return torch.randint(-8, 8, (rows, inputs), generator=torch.Generator().manual_seed(0)).to(torch.int8)


def read(scale: Floats, offset: Floats | None, kind: str) -> None:
    """Write random codes with these scales, and compare what the gguf package reads with scale × code + offset."""
    values = codes(len(scale))
    data, found = four_bit_blocks(pack_int4(values).numpy(), scale, offset, "x")
    assert found == kind
    group = values.shape[1] // scale.shape[1]
    wide = (values.numpy() + (0 if offset is None else 8)).astype(np.float32) * scale.repeat(group, 1)
    wanted = wide if offset is None else wide + offset.repeat(group, 1)
    assert np.array_equal(gguf.dequantize(data, gguf.GGMLQuantizationType[kind]), wanted)


@pytest.mark.parametrize("group", [32, 64, 512])
def test_groups_around_zero_are_q4_0_and_others_q4_1(group: int) -> None:
    generator = np.random.default_rng(0)
    scale = generator.uniform(-1, 1, (6, 512 // group)).astype(np.float16).astype(np.float32)
    read(scale, None, "Q4_0")
    read(scale, -8 * scale, "Q4_0")
    read(scale, generator.uniform(-1, 1, scale.shape).astype(np.float16).astype(np.float32), "Q4_1")


@pytest.mark.parametrize("sign", [1, -1])
def test_scales_of_six_bits_are_q4_k(sign: int) -> None:
    generator = np.random.default_rng(0)
    units = generator.uniform(1e-3, 2e-3, (2, 6, 2, 1)).astype(np.float16).astype(np.float32)
    whole = generator.integers(0, 64, (2, 6, 2, 8)).astype(np.float32)
    whole[0, 0, 0] = 0  # a block of one value
    scale, floor = (units * whole).reshape(2, 6, 16)
    read(scale, -sign * floor, "Q4_K")


def test_what_no_block_holds_is_refused_by_name() -> None:
    generator = np.random.default_rng(0)
    scale = generator.uniform(1, 2, (6, 16)).astype(np.float32)
    with pytest.raises(InputError, match=r"^x has scales of 1.* that float16 does not hold"):
        four_bit_blocks(pack_int4(codes()).numpy(), scale, None, "x")
    half = scale.astype(np.float16).astype(np.float32)
    with pytest.raises(InputError, match="float16 does not hold"):
        four_bit_blocks(pack_int4(codes()).numpy(), half * 1e5, None, "x")  # beyond its range
    with pytest.raises(InputError, match="float16 does not hold"):
        four_bit_blocks(pack_int4(codes(inputs=160)).numpy(), half[:, :5], scale[:, :5], "x")  # no blocks of 256


@pytest.mark.parametrize(("offsets", "kind"), [("false", "Q4_0"), ("true", "Q4_1"), ('"whole"', "Q4_1")])
def test_an_artifact_reads_back_as_it_is(tiny_checkpoint: Path, tmp_path: Path, offsets: str, kind: str) -> None:
    settings = [*FOUR, f"steps.0.offsets={offsets}"]
    artifact = run_recipe(write_recipe(tmp_path, tiny_checkpoint, tmp_path / "artifact"), settings)
    export_artifact(artifact, GGUF, tmp_path / "model.gguf", force=False, progress=Silent())
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {found for name, found in kinds.items() if ".attn_" in name or ".ffn_" in name} == {kind, "F32"}
    assert reader.fields["general.file_type"].contents() == {"Q4_0": 2, "Q4_1": 3}[kind]
    back = open_checkpoint(import_model(str(tmp_path / "model.gguf"), tmp_path / "back"))
    checkpoint = open_decoder_artifact(artifact).checkpoint
    assert checkpoint.quantization is not None
    names = [name.removesuffix(".weight") for name in back.tensor_names if name.endswith("_proj.weight")]
    for name, scheme in quantized_modules(checkpoint.quantization, names).items():
        assert scheme.bits == 4
        assert torch.equal(back.get(f"{name}.weight"), dequantized(name, scheme, checkpoint.get)), name
