"""Write a round-to-nearest W4A8 artifact in compressed-tensors layout from a checkpoint, for tests of loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.files import publish_folder
from penjing.core.manifest import write_manifest
from penjing.kernels.int4_linear import pack_int4
from tests.core.artifact.int8_artifact import quantize_channels

GROUP = 32


def quantization_config(eight: list[str], **changes: Any) -> dict[str, Any]:
    """W4A8 of every linear layer but the LM head, W8A8 of the modules `eight`."""
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    four = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
    channel = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": four, "input_activations": activations}}
    if eight:
        groups["group_0"]["format"] = "pack-quantized"  # type: ignore[assignment]
        eights = {"targets": eight, "weights": channel, "input_activations": activations, "format": "int-quantized"}
        groups["group_1"] = eights  # type: ignore[assignment]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if eight else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    } | changes


def write_int4_artifact(
    source: Path,
    out: Path,
    *,
    eight: tuple[str, ...] = (),
    quantization: dict[str, Any] | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
    change: Callable[[str, Tensor], Tensor | None] = lambda name, tensor: tensor,
) -> Path:
    """Quantize the linear layers of `source`, those whose name ends with one of `eight` to 8 bits.

    `change` maps each (name, tensor) to what is written; None leaves it out.
    """
    checkpoint = open_checkpoint(source)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in checkpoint.tensor_names:
            tensor = checkpoint.get(name).float()
            module = name.removesuffix(".weight")
            if not name.endswith("_proj.weight"):
                yield name, tensor
            elif module.endswith(eight) and eight:
                weight, scale = quantize_channels(tensor)
                yield name, weight
                yield f"{name}_scale", scale
            else:
                groups = tensor.unflatten(1, (-1, GROUP))
                scale = (groups.abs().amax(2) / 7).to(scale_dtype)
                integers = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1)
                yield f"{module}.weight_packed", pack_int4(integers.to(torch.int8))
                yield f"{module}.weight_scale", scale
                yield f"{module}.weight_shape", torch.tensor(tensor.shape)

    if quantization is None:
        quantization = quantization_config([f"re:.*{end}$" for end in eight])
    changed = ((name, change(name, tensor)) for name, tensor in tensors())
    with publish_folder(out) as partial:
        save_checkpoint(
            partial,
            checkpoint.config,
            ((name, tensor) for name, tensor in changed if tensor is not None),
            tokenizer_from=source,
            extra_config={"quantization_config": quantization},
        )
        write_manifest(partial, "artifact", {"command": "test"})
    return out
