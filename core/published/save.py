"""A network is written as the folder that other engines read it from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.decoder import save_checkpoint, save_folder
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import NATIVE
from penjing.core.published.forms import published
from penjing.core.published.tensors import Pairs, Spelling


def save_published(
    folder: Path,
    config: DecoderConfig,
    tensors: Pairs,
    *,
    tokenizer_from: Path,
    dtype: torch.dtype = torch.float32,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Fill `folder`, not yet published, with the configuration, the weights and the tokenizer.

    Args:
        tensors: (name, tensor) pairs under our names, consumed one at a time.
        tokenizer_from: the folder of the network, which messages name, too.
        dtype: of the weights that are floats, as `config.json` says it. What a factor or a sum made wider has it again
            where it is one of its numbers, and stays in float32 else.
        quantization: `quantization_config` with our names of modules.

    Raises:
        InputError: an architecture that only penjing reads.
    """
    source, said = str(tokenizer_from), str(dtype).removeprefix("torch.")
    if config.model_type != NATIVE:
        extra = {} if quantization is None else {"quantization_config": quantization}
        save_checkpoint(folder, config, tensors, tokenizer_from=tokenizer_from, dtype=said, extra_config=extra)
        return
    form = published(config, source)
    spelling = Spelling(form.fold, source)
    extra = {} if quantization is None else {"quantization_config": _spelled(quantization, spelling)}
    values = form.values | {"dtype": said} | extra
    written = ((name, _narrowed(tensor, dtype)) for name, tensor in spelling.tensors(tensors))
    save_folder(folder, values, written, tokenizer_from=tokenizer_from)


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    made = tensor.to(dtype)
    far = (made.to(torch.float32) - tensor).abs() > tensor.abs() * 2.0**-20  # some units in the last place of float32
    return tensor if bool(far.any()) else made


def _spelled(quantization: dict[str, Any], spelling: Spelling) -> dict[str, Any]:
    groups = quantization["config_groups"]
    lists = {"ignore": quantization["ignore"]} | {name: group["targets"] for name, group in groups.items()}
    named = {name: _names(modules, spelling) for name, modules in lists.items()}
    changed = {name: group | {"targets": named[name]} for name, group in groups.items()}
    return quantization | {"ignore": named["ignore"], "config_groups": changed}


def _names(modules: list[str], spelling: Spelling) -> list[str]:
    """Modules under their names there, each once; a class of them keeps its own."""
    return list(dict.fromkeys(spelling.module(each) if "_" in each else each for each in modules))
