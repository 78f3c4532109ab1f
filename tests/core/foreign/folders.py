"""Folders as other programs quantize them, written from a tiny checkpoint with random integers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file
from torch import Tensor

from penjing.core.checkpoint.decoder import copy_tokenizer, open_checkpoint
from penjing.core.foreign.awq import ORDER
from penjing.core.foreign.layer import Grouped

Tensors = dict[str, Tensor]
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """The quantization_config of weights alone."""
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def random_layer(weight_NK: Tensor, bits: int, size: int, symmetric: bool, ordered: bool, seed: int) -> Grouped:
    """`weight_NK` rounded to a grid with random zeros."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = weight_NK.shape
    groups, top = inputs // size, (1 << bits) - 1
    order_K = torch.arange(inputs) // size
    if ordered:
        order_K = order_K[torch.randperm(inputs, generator=generator)]
    scale_NG = (torch.rand(outputs, groups, generator=generator) * 0.3 + 0.85) * weight_NK.abs().amax() / (top // 2)
    scale_NG = scale_NG.half()
    zero_NG = torch.full((outputs, groups), (top + 1) // 2, dtype=torch.uint8)
    if not symmetric:  # near the middle, so that the network still computes something
        zero_NG += torch.randint(-2, 3, zero_NG.shape, generator=generator).to(torch.uint8)
    code_NK = (weight_NK / scale_NG.float()[:, order_K] + zero_NG[:, order_K]).round().clamp(0, top)
    return Grouped(bits, code_NK.to(torch.uint8), zero_NG, scale_NG, order_K if ordered else None, size)


def words(numbers: Tensor, bits: int) -> Tensor:
    """(…, M) → (…, M × bits / 32) int32, the first number in the lowest bits."""
    a_word = 32 // bits
    parts = numbers.to(torch.int64).unflatten(-1, (-1, a_word)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.uint32).view(torch.int32).contiguous()


def gptq(layer: Grouped, first_version: bool = True) -> Tensors:
    """As AutoGPTQ packs a layer."""
    zeros = layer.zero_NG.t().to(torch.int64) - int(first_version)
    return {
        "qweight": words(layer.code_NK, layer.bits).t().contiguous(),
        "qzeros": words(zeros, layer.bits),
        "scales": layer.scale_NG.t().contiguous(),
        "g_idx": layer.groups().to(torch.int32),
    }


def awq(layer: Grouped) -> Tensors:
    """As AutoAWQ packs a layer."""

    def ordered(numbers: Tensor) -> Tensor:
        return words(numbers.unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2), 4)

    return {
        "qweight": ordered(layer.code_NK.t()),
        "qzeros": ordered(layer.zero_NG.t()),
        "scales": layer.scale_NG.t().contiguous(),
    }


def packed(layer: Grouped) -> Tensors:
    """As compressed-tensors packs a layer."""
    middle = 1 << (layer.bits - 1)
    signed = (layer.code_NK.to(torch.int16) - middle).to(torch.int8)
    tensors = {
        "weight_packed": pack_to_int32(signed, layer.bits),
        "weight_shape": torch.tensor(signed.shape),
        "weight_scale": layer.scale_NG,
    }
    if not layer.symmetric():
        zeros = (layer.zero_NG.to(torch.int16) - middle).to(torch.int8)
        tensors["weight_zero_point"] = pack_to_int32(zeros, layer.bits, packed_dim=0)
    if layer.group_K is not None:
        tensors["weight_g_idx"] = layer.group_K.to(torch.int32)
    return tensors


def plain(layer: Grouped) -> Tensors:
    """As compressed-tensors stores a layer of 8 bits that is not packed."""
    return {"weight": (layer.code_NK.to(torch.int16) - 128).to(torch.int8), "weight_scale": layer.scale_NG}


def write(
    source: Path,
    out: Path,
    quantization: dict[str, Any],
    pack: Callable[[Grouped], Tensors],
    *,
    bits: int = 4,
    size: int = 32,
    symmetric: bool = False,
    ordered: bool = False,
    change: Callable[[Tensors], None] = lambda tensors: None,
) -> dict[str, Tensor]:
    """Write `out` from the checkpoint `source`; `size` 0 is one group a row.

    Args:
        change: changes what is stored, in place.

    Returns:
        Name of each weight → what it is in floating point, (out, in) float32.
    """
    checkpoint = open_checkpoint(source)
    tensors, weights = Tensors(), Tensors()
    for index, name in enumerate(checkpoint.tensor_names):
        value = checkpoint.get(name)
        weights[name] = value
        if not name.endswith("_proj.weight"):
            tensors[name] = value
            continue
        layer = random_layer(value, bits, size or value.shape[1], symmetric, ordered, index)
        weights[name] = layer.dequantize()
        tensors |= {f"{name.removesuffix('.weight')}.{leaf}": each for leaf, each in pack(layer).items()}
    change(tensors)
    out.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    values = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(values))
    copy_tokenizer(source, out)
    return weights
