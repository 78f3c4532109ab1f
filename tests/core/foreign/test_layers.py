"""Layers that AutoGPTQ 0.7.1 and AutoAWQ 0.2.9 packed, and the weights that they compute with: recorded by
benchmarks/peers/packed_reference.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from penjing.core.foreign.awq import Awq
from penjing.core.foreign.compressed import Compressed
from penjing.core.foreign.gptq import Gptq
from penjing.core.foreign.layer import Grouped, Packing
from tests.core.foreign.folders import WEIGHTS, awq, compressed, gptq

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "reference/packed.json").read_text())
TYPES = {"scales": torch.float16}
NAMES = {torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.float32: "F32"}


class Stored:
    """The tensors of one layer, "x"."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {f"x.{name}": tensor for name, tensor in tensors.items()}

    def stored(self, name: str) -> Tensor:
        return self._tensors[name]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored_dtype(self, name: str) -> str:
        return NAMES[self._tensors[name].dtype]


def read(case: str) -> tuple[Grouped, Stored]:
    values = RECORDED[case]
    packing: Packing = (Awq if case.startswith("awq") else Gptq)(values, case)
    tensors = values["tensors"].items()
    stored = Stored({name: torch.tensor(each, dtype=TYPES.get(name, torch.int32)) for name, each in tensors})
    assert packing.check("x", stored) == (32, 64)
    return packing.read("x", stored), stored


@pytest.mark.parametrize("case", RECORDED)
def test_the_weight_is_theirs_to_the_last_bit(case: str) -> None:
    weight = read(case)[0].dequantize()
    assert weight[0].tolist() == RECORDED[case]["first_row"]
    assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == RECORDED[case]["sha256"]


@pytest.mark.parametrize("case", RECORDED)
def test_what_the_other_tests_write_is_what_they_write(case: str) -> None:
    layer, stored = read(case)
    for leaf, tensor in (awq if case.startswith("awq") else gptq)(layer).items():
        assert torch.equal(tensor, stored.stored(f"x.{leaf}")), leaf


def test_symmetric_and_ordered_are_seen() -> None:
    assert {case for case in RECORDED if read(case)[0].symmetric()} == {"gptq_symmetric"}
    assert {case for case in RECORDED if read(case)[0].group_K is not None} == {"gptq_ordered"}


@pytest.mark.parametrize("layout", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"symmetric": False},
        {"num_bits": 8, "symmetric": False},
        {"strategy": "channel", "group_size": None, "symmetric": False},
        {"num_bits": 8, "strategy": "channel", "group_size": None},
    ],
    ids=str,
)
def test_compressed_tensors_own_compressor_is_undone(layout: str, changes: dict[str, Any]) -> None:
    """Its integers read from what it stores, as it decompresses them itself."""
    weights = WEIGHTS | changes
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    top = 1 << (weights["num_bits"] - 1)
    groups = 1 if weights["strategy"] == "channel" else 2
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=generator)
    state = {"weight": weight, "weight_scale": torch.rand(24, groups, generator=generator) * 3 / top + 0.01}
    if not weights["symmetric"]:
        state["weight_zero_point"] = torch.randint(-top, top, (24, groups), generator=generator).to(torch.int8)
    compressor = PackedQuantizationCompressor if layout == "pack-quantized" else IntQuantizationCompressor
    stored = compressor.compress(state, scheme)
    packing = Compressed(compressed(layout, **changes), "test")
    assert packing.modules([f"x.{name}" for name in stored]) == ["x"]
    assert packing.check("x", Stored(stored)) == (24, 64)
    assert torch.equal(packing.read("x", Stored(stored)).dequantize(), compressor.decompress(stored, scheme)["weight"])
