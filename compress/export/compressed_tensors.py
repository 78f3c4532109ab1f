"""A decoder artifact as transformers, vLLM and SGLang read it: compressed-tensors, without what penjing alone reads.

The weights are the artifact's own files; an embedding in INT8 becomes float16, since others look up floats, and weights
that are stored in 4 bits with whole scales become the bytes that they stand for. The gate
loads them with transformers and compressed-tensors, where these are installed; they divide activations by amax / 127.5
and may reach −128, our kernels by amax / 127, so layers agree to that difference of rounding and not to the last bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.decoder.parity import Computed
from penjing.core.artifact.decoder import DecoderArtifact
from penjing.core.checkpoint.decoder import TOKENIZER_FILES, Checkpoint
from penjing.core.errors import InputError, first_line
from penjing.core.models.hf_config import NATIVE
from penjing.core.published.save import save_published
from penjing.core.published.table import names_with_floating_embedding, with_floating_embedding
from penjing.core.runtime.schemes import (
    EMBEDDING_MODULE,
    INT8_FORMAT,
    WEIGHT_FIELDS,
    has_int8_embedding,
    has_steps,
)
from penjing.kernels.stepped import stepped_int8

LOADER = "transformers"
NOT_INSTALLED = "transformers and compressed-tensors are not installed: pip install transformers compressed-tensors"

EXPERTS = "transformers 5 joins the experts of a layer and cannot load them in INT8; each is stored by itself, for vLLM"


def write_compressed_tensors(artifact: DecoderArtifact, folder: Path) -> None:
    """Fill `folder`, not yet published, with the configuration, the weights and the tokenizer.

    Raises:
        InputError: an architecture that only penjing reads.
    """
    source, checkpoint = artifact.checkpoint.folder, artifact.checkpoint
    quantization = checkpoint.quantization
    if checkpoint.config.model_type == NATIVE or has_int8_embedding(quantization) or has_steps(quantization):
        _write_anew(checkpoint, folder)
        return
    # The rest, of folders inside, is for penjing alone.
    top = [name for name in artifact.manifest.sha256 if "/" not in name]
    names = [name for name in top if name.endswith((".safetensors", ".safetensors.index.json"))]
    for name in ["config.json", *names, *TOKENIZER_FILES]:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_anew(checkpoint: Checkpoint, folder: Path) -> None:
    """Names and norms become those of a published family. An embedding in INT8 becomes float16 and apart from the LM
    head, since other engines look up no integers. Weights that are stored in steps become bytes: the same integers."""
    quantization = dict(checkpoint.quantization or {})
    groups = quantization["config_groups"].items()
    kept = {key: group for key, group in groups if group["targets"] != [EMBEDDING_MODULE]}
    if has_steps(quantization):  # beside layers in 8 bits, with which they now agree
        bytes_alone = {"weights": WEIGHT_FIELDS, "format": INT8_FORMAT}
        kept, quantization["format"] = {key: group | bytes_alone for key, group in kept.items()}, INT8_FORMAT
    quantization["config_groups"] = kept
    untied = {"tie_word_embeddings": False} if has_int8_embedding(checkpoint.quantization) else {}
    config = checkpoint.config.model_copy(update=untied)
    tensors = _tensors(checkpoint)
    save_published(folder, config, tensors, tokenizer_from=checkpoint.folder, quantization=quantization)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    tables = has_int8_embedding(checkpoint.quantization)
    for name in names_with_floating_embedding(checkpoint) if tables else checkpoint.tensor_names:
        module, _, end = name.rpartition(".")
        if f"{module}.weight_step" not in checkpoint.tensor_names or end == "bias":
            yield name, with_floating_embedding(checkpoint, name)
        elif end == "weight_scale":
            yield name, checkpoint.get(name)
            parts = (checkpoint.get(f"{module}.{part}") for part in ("weight_packed", "weight_step", "weight_offset"))
            yield f"{module}.weight", stepped_int8(*parts).expand()


def can_read(*beside: str) -> bool:
    """Whether the loader is installed, and what it needs beside itself."""
    return all(find_spec(name) is not None for name in (LOADER, *beside))


def cannot_read(checkpoint: Checkpoint) -> str | None:
    """Why the loader cannot read what is written of `checkpoint` here; None: it can."""
    if checkpoint.config.moe is not None:
        return EXPERTS
    return None if can_read("compressed_tensors") else NOT_INSTALLED


@torch.no_grad()
def read_sequences(folder: Path, sequences: list[tuple[list[int], int]]) -> list[Computed]:
    """Read each sequence with transformers in float32, a whole sequence at a time.

    Raises:
        InputError: it cannot load the folder.
    """
    from transformers import AutoModelForCausalLM

    try:
        with redirect_stderr(StringIO()):  # progress bars of five steps, two of which come with the first call
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            model(torch.tensor([sequences[0][0][:1]]), use_cache=False)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise InputError(f"transformers cannot load the export ({first_line(error)[:200]})") from error
    return [_read(model, ids) for ids, _ in sequences]


def _read(model: Any, ids: list[int]) -> Computed:
    hidden: list[Tensor] = []

    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not hidden:
            hidden.append(inputs[0][0].clone())

    def after(_: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        hidden.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    handles = [model.model.layers[0].register_forward_pre_hook(before)]
    handles += [layer.register_forward_hook(after) for layer in model.model.layers]
    try:
        logits_TV = model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return Computed(hidden, logits_TV)
