"""Writes tests/core/foreign/reference/packed.json: random layers as AutoGPTQ and AutoAWQ pack them, and the weights
that these programs compute with.

    bash benchmarks/peers/packed.sh
    build/peers/packed/venv/bin/python benchmarks/peers/packed_reference.py
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "build/peers/packed/sources"
OUT = ROOT / "tests/core/foreign/reference/packed.json"
INPUTS, OUTPUTS, GROUP = 64, 32, 32
CASES = ("gptq", "gptq_symmetric", "gptq_ordered", "gptq_channel", "gptq_8", "awq", "awq_channel")


def unimported(name: str) -> Any:
    """The module `name` of SOURCES without the `__init__` of the packages above it, which want CUDA and more."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if package not in sys.modules:
            module = types.ModuleType(package)
            module.__path__ = [str(SOURCES.joinpath(*parts[:count]))]
            sys.modules[package] = module
    return import_module(name)


def layer(case: str) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """A layer whose weights lie on a grid, its scales (G, N), zeros (G, N), groups of inputs, bits and group size."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    bits, size = (8 if case == "gptq_8" else 4), (INPUTS if case.endswith("channel") else GROUP)
    top, groups = (1 << bits) - 1, INPUTS // size
    # AutoGPTQ stores zeros less 1 and has none of 0; its symmetric zeros are the middle
    zeros = torch.randint(1, top + 1, (groups, OUTPUTS), generator=generator).float()
    if case == "gptq_symmetric":
        zeros.fill_((top + 1) // 2)
    scales = (torch.rand(groups, OUTPUTS, generator=generator) * 0.02 + 0.002).half().float()
    order = torch.arange(INPUTS) // size
    if case == "gptq_ordered":
        order = order[torch.randperm(INPUTS, generator=generator)]
    codes = torch.randint(0, top + 1, (INPUTS, OUTPUTS), generator=generator).float()
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = ((codes - zeros[order]) * scales[order]).t().contiguous()
    return linear, scales, zeros, order, bits, size


def of_gptq(case: str) -> dict[str, Any]:
    """What AutoGPTQ stores, and the answers of its layer to unit vectors: its weight."""
    linear, scales, zeros, order, bits, size = layer(case)
    module = unimported("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    made = module.QuantLinear(bits, size, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
    made.pack(linear, scales.t().clone(), zeros.t().clone(), order.to(torch.int32))
    with torch.no_grad():
        weight = made(torch.eye(INPUTS)).t()
    return {"bits": bits, "group_size": size, "desc_act": case == "gptq_ordered"} | stored(
        {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "g_idx": made.g_idx}, weight
    )


def of_awq(case: str) -> dict[str, Any]:
    """What AutoAWQ stores, and its own dequantized weight."""
    linear, scales, zeros, _, bits, size = layer(case)
    gemm = unimported("awq.modules.linear.gemm")
    made = gemm.WQLinear_GEMM.from_linear(linear, bits, size, scales=scales, zeros=zeros)
    weight = gemm.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), bits, size).t()
    return {"bits": bits, "group_size": size} | stored(
        {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}, weight
    )


def stored(tensors: dict[str, torch.Tensor], weight: torch.Tensor) -> dict[str, Any]:
    """Tensors as numbers; of the weight, (outputs, inputs) float32, its first row and the hash of all its bytes."""
    weight = weight.float().contiguous()
    values = {name: tensor.tolist() for name, tensor in tensors.items()}
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    return {"tensors": values, "first_row": weight[0].tolist(), "sha256": digest}


def main() -> None:
    """Write the file."""
    found = {case: (of_awq if case.startswith("awq") else of_gptq)(case) for case in CASES}
    lines = ",\n".join(
        f"{json.dumps(case)}: {json.dumps(values, separators=(',', ':'))}" for case, values in found.items()
    )
    OUT.write_text("{\n" + lines + "\n}\n")
    print(f"{OUT}: {len(found)} layers")


if __name__ == "__main__":
    main()
