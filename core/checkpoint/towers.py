"""Checkpoint folders of two towers: `config.json`, safetensors, `tokenizer.json`, `sentence_bert_config.json` (the
longest text), `penjing.json`. Those of CLIP and SigLIP are in Hugging Face's layout; see `paired.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.checkpoint.paired import is_paired, load_paired, paired_config, paired_tensors, save_paired_config
from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import MANIFEST_NAME, read_json_object, verify, write_manifest
from penjing.core.text.text_tokenizer import LIMITS
from penjing.core.vision.paired_config import ImageTransformerConfig
from penjing.core.vision.towers import TowersConfig, TwoTowers

WEIGHTS = "model.safetensors"


def save_towers(
    folder: Path, model: nn.Module, config: TowersConfig, tokenizer_from: Path, max_tokens: int,
    created_by: dict[str, Any],
) -> None:  # fmt: skip
    """Fill `folder`, not yet published (see `publish_folder`); longer texts than `max_tokens` are cut."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    copy_tokenizer(tokenizer_from, folder)
    if isinstance(config.image, ImageTransformerConfig):
        save_paired_config(folder, config)
        tensors = paired_tensors(config, tensors)
    else:
        atomic_write_text(folder / "config.json", json.dumps(config.model_dump(), indent=2) + "\n")
    atomic_write_text(folder / LIMITS, json.dumps({"max_seq_length": max_tokens}) + "\n")
    save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_manifest(folder, "checkpoint", created_by)


def towers_config(folder: Path) -> TowersConfig:
    """The content of the towers' `config.json`.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    path = folder / "config.json"
    values = read_json_object(path)
    if is_paired(values):
        return paired_config(folder)
    try:
        return parse_config(TowersConfig, values, str(path))
    except ConfigError as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error


def load_towers(folder: Path) -> TwoTowers:
    """The towers in evaluation mode, on the CPU; every hash is checked, where a folder of Hugging Face has any.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    config = towers_config(folder)
    paired = isinstance(config.image, ImageTransformerConfig)
    if not paired or (folder / MANIFEST_NAME).exists():
        verify(folder)
    if paired:
        return load_paired(folder, config).eval()
    try:
        tensors = load_file(folder / WEIGHTS)
        model = TwoTowers(config)
        model.load_state_dict(tensors)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error
    return model.eval()
