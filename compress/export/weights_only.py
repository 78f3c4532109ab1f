"""A decoder artifact as other programs quantize decoders: integers of the weights, activations in floating point.

What is written is compressed-tensors' pack-quantized format without input activations: W4A16 for layers of 4 bits in
groups, W8A16 for those of 8 bits with a scale a channel. Integers and scales are the artifact's. A group's offset
becomes a zero point, −offset / scale, which must be whole: it is where groups are symmetric, where another program made
them (AWQ, GPTQ), and where they were made with offsets="whole".

    X.weight_packed      (N, K × bits / 32) int32, the lowest bits first; stored integers lie above −2^(bits − 1)
    X.weight_zero_point  (N / 8, G) int32, outputs packed in the same way; where a zero point is not the middle
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.core.artifact.decoder import QUANT_METHOD
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.foreign.layer import WORD
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.published.save import save_published
from penjing.core.published.table import names_with_floating_embedding, with_floating_embedding
from penjing.core.runtime.schemes import (
    INT4_FORMAT,
    INT4_WEIGHT_FIELDS,
    WEIGHT_FIELDS,
    Scheme,
    has_int8_embedding,
    quantized_modules,
)

ZERO_POINTS = "transformers 5 does not load packed zero points; no other loader was tried"
MIDDLE = 8  # what a stored code of 4 bits lies above −8


def write_weights_only(checkpoint: Checkpoint, folder: Path) -> bool:
    """Fill `folder`, not yet published, with the configuration, the weights and the tokenizer.

    Returns:
        Whether it has zero points.

    Raises:
        InputError: an architecture that only penjing reads, or offsets that no zero points are.
    """
    assert checkpoint.quantization is not None  # an artifact's
    shapes = tensor_shapes(checkpoint.config)
    linears = [name.removesuffix(".weight") for name in shapes if name.endswith("_proj.weight")] + ["lm_head"]
    schemes = quantized_modules(checkpoint.quantization, linears)
    if any(scheme.steps for scheme in schemes.values()):
        raise InputError(
            f'{checkpoint.folder} was made with scales="whole", whose offsets are no zero points: export --to gguf, '
            "or --to compressed-tensors, as W8A8"
        )
    symmetric = all(_is_symmetric(checkpoint, name, scheme) for name, scheme in schemes.items())
    untied = {"tie_word_embeddings": False} if has_int8_embedding(checkpoint.quantization) else {}
    save_published(
        folder,
        checkpoint.config.model_copy(update=untied),
        _tensors(checkpoint, schemes, symmetric),
        tokenizer_from=checkpoint.folder,
        quantization=_quantization(checkpoint.quantization, schemes, symmetric),
    )
    return not symmetric


def zero_points(scale_NG: Tensor, offset_NG: Tensor) -> Tensor | None:
    """(N, G) uint8 zeros from 0 to 15 with offset = −zero × scale; None where there are no such."""
    scale, offset = scale_NG.to(torch.float64), offset_NG.to(torch.float64)
    zero = torch.where(scale == 0, MIDDLE, (-offset / scale).round())
    fits = (zero >= 0) & (zero <= 15) & (zero * scale == -offset)
    return zero.to(torch.uint8) if bool(fits.all()) else None


def packed(codes: Tensor, bits: int) -> Tensor:
    """(…, M) whole numbers from 0 to 2^bits − 1 → (…, ⌈M × bits / 32⌉) int32, the first in the lowest bits."""
    a_word = WORD // bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % a_word))
    words = (padded.unflatten(-1, (-1, a_word)) << torch.arange(0, WORD, bits)).sum(dim=-1)
    return words.to(torch.uint32).view(torch.int32)


def _tensors(checkpoint: Checkpoint, schemes: dict[str, Scheme], symmetric: bool) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything that is stored, one layer in memory at a time."""
    by_tensor = {name: module for module, scheme in schemes.items() for name in scheme.tensor_names(module)}
    written = set[str]()
    tables = has_int8_embedding(checkpoint.quantization)
    for name in names_with_floating_embedding(checkpoint) if tables else checkpoint.tensor_names:
        module = by_tensor.get(name)
        if module is None:
            yield name, with_floating_embedding(checkpoint, name)
        elif module not in written:
            written.add(module)
            yield from _layer(checkpoint, module, schemes[module], symmetric)


def _layer(checkpoint: Checkpoint, module: str, scheme: Scheme, symmetric: bool) -> Iterator[tuple[str, Tensor]]:
    scale = with_floating_embedding(checkpoint, f"{module}.weight_scale")
    if scheme.bits == 8:
        weight_NK = with_floating_embedding(checkpoint, f"{module}.weight")
        yield f"{module}.weight_packed", packed(weight_NK.to(torch.int16) + 128, 8)
        yield f"{module}.weight_shape", torch.tensor(weight_NK.shape)
        yield f"{module}.weight_scale", scale.view(-1, 1)
        return
    yield f"{module}.weight_packed", checkpoint.get(f"{module}.weight_packed")
    yield f"{module}.weight_shape", checkpoint.get(f"{module}.weight_shape")
    yield f"{module}.weight_scale", scale
    if not symmetric:
        yield f"{module}.weight_zero_point", packed(_zeros(checkpoint, module, scheme).t(), 4).t().contiguous()


def _zeros(checkpoint: Checkpoint, module: str, scheme: Scheme) -> Tensor:
    scale_NG = checkpoint.get(f"{module}.weight_scale")
    if not scheme.offsets:
        return torch.full(scale_NG.shape, MIDDLE, dtype=torch.uint8)
    zero_NG = zero_points(scale_NG, checkpoint.get(f"{module}.weight_offset"))
    if zero_NG is None:
        raise InputError(
            f"{checkpoint.folder}: {module} has offsets that are no whole multiples of its scales, and zero points of "
            'compressed-tensors are whole: export --to gguf, or compress with offsets="whole"'
        )
    return zero_NG


def _is_symmetric(checkpoint: Checkpoint, module: str, scheme: Scheme) -> bool:
    return scheme.bits == 8 or bool((_zeros(checkpoint, module, scheme) == MIDDLE).all())


def _quantization(artifact: dict[str, Any], schemes: dict[str, Scheme], symmetric: bool) -> dict[str, Any]:
    four = {scheme.group for scheme in schemes.values() if scheme.bits == 4}
    eight = [name for name, scheme in schemes.items() if scheme.bits == 8]
    groups: dict[str, Any] = {}
    if four:
        fields = INT4_WEIGHT_FIELDS | {"group_size": four.pop(), "symmetric": symmetric}
        groups["group_0"] = _group(["Linear"], fields)
    if eight:
        groups[f"group_{len(groups)}"] = _group(eight if groups else ["Linear"], WEIGHT_FIELDS)
    return {
        "quant_method": QUANT_METHOD,
        "format": INT4_FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": artifact.get("kv_cache_scheme"),
        "ignore": artifact["ignore"],
        "config_groups": groups,
    }


def _group(targets: list[str], weights: dict[str, Any]) -> dict[str, Any]:
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
