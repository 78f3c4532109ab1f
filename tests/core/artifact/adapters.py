"""Folders with an adapter as PEFT writes them, for any decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.models.tensor_names import tensor_shapes

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj", "out_proj", "g_proj")


def adapter_tensors(base: Path, rank: int = 4, seed: int = 0, of: tuple[str, ...] = ALL) -> dict[str, Tensor]:
    """Random matrices beside the linear layers of `base` whose name ends as `of` says, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(open_checkpoint(base).config).items():
        layer = name.removesuffix(".weight")
        if layer.endswith(of):
            for part, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                values = torch.randn(size, generator=generator) / size[1] ** 0.5
                tensors[f"base_model.model.{layer}.lora_{part}.weight"] = values
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int = 4, **settings: Any) -> Path:
    """A folder of `tensors`; alpha is twice the rank unless `settings` say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(ALL)}
    (folder / "adapter_config.json").write_text(json.dumps(values | settings))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merge(tensors: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The weights of a decoder with an adapter added to them."""
    found = dict(tensors)
    for name, a_RK in adapter.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").split(".lora_A.")[0]
            found[f"{layer}.weight"] = found[f"{layer}.weight"] + scale * (adapter[name.replace("_A.", "_B.")] @ a_RK)
    return found
