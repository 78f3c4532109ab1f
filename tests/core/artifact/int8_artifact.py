"""Write a round-to-nearest INT8 artifact in compressed-tensors layout from a checkpoint, for tests of loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.files import publish_folder
from penjing.core.manifest import write_manifest


def quantization_config(ignore: list[str], **changes: Any) -> dict[str, Any]:
    """W8A8 of every linear layer but `ignore`; `changes` replace fields of the whole."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    } | changes


def above_zero_points(*targets: str) -> dict[str, Any]:
    """`config_groups` in which the activations of `targets` have zero points."""
    group = quantization_config([])["config_groups"]["group_0"]
    above = group | {"targets": list(targets), "input_activations": group["input_activations"] | {"symmetric": False}}
    return {"group_0": group, "group_1": above}


def quantize_channels(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Round to nearest with one scale a row: int8 (N, K), float32 (N, 1)."""
    scale = weight_NK.abs().amax(1, keepdim=True) / 127
    return torch.round(weight_NK / scale).to(torch.int8), scale


def write_int8_artifact(
    source: Path,
    out: Path,
    *,
    quantize_head: bool = False,
    embedding_dtype: torch.dtype = torch.float32,
    quantization: dict[str, Any] | None = None,
    change: Callable[[str, Tensor], Tensor | None] = lambda name, tensor: tensor,
) -> Path:
    """Quantize the linear layers of `source`; with `quantize_head` the LM head is untied and quantized too.

    `change` maps each (name, tensor) to what is written; None leaves it out.
    """
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    if quantize_head:
        config = config.model_copy(update={"tie_word_embeddings": False})

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in checkpoint.tensor_names:
            tensor = checkpoint.get(name).float()
            if name.endswith("_proj.weight"):
                yield from quantized(name, tensor)
            elif name == "model.embed_tokens.weight":
                yield name, tensor.to(embedding_dtype)
                if quantize_head:
                    yield from quantized("lm_head.weight", tensor)
            else:
                yield name, tensor

    def quantized(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        weight, scale = quantize_channels(tensor)
        yield name, weight
        yield f"{name}_scale", scale

    if quantization is None:
        quantization = quantization_config([] if quantize_head else ["lm_head"])
    changed = ((name, change(name, tensor)) for name, tensor in tensors())
    with publish_folder(out) as partial:
        save_checkpoint(
            partial,
            config,
            ((name, tensor) for name, tensor in changed if tensor is not None),
            tokenizer_from=source,
            extra_config={"quantization_config": quantization},
        )
        write_manifest(partial, "artifact", {"command": "tests"})
    return out
