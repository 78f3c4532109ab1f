"""Checkpoint folders of two towers: `config.json`, safetensors, `tokenizer.json`, `sentence_bert_config.json` (the
longest text), `penjing.json`. Those of CLIP and SigLIP are in Hugging Face's layout; see `towers_config.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.checkpoint.named import named_tensors
from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.checkpoint.towers_config import save_towers_config, towers_config
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import MANIFEST_NAME, verify, write_manifest
from penjing.core.text.text_tokenizer import LIMITS
from penjing.core.vision.towers import TwoTowers
from penjing.core.vision.towers_config import TowersConfig

WEIGHTS = "model.safetensors"
_NAMES = {
    "clip": {
        "image.projection.": "visual_projection.", "image.": "vision_model.", "text.": "text_model.",
        "text_projection.": "text_projection.",
    },
    "siglip": {"image.": "vision_model.", "text.": "text_model.", "text_projection.": "text_model.head."},
}  # fmt: skip
# Older files store what config.json determines.
_UNUSED = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")


def save_towers(
    folder: Path, model: nn.Module, config: TowersConfig, tokenizer_from: Path, max_tokens: int,
    created_by: dict[str, Any],
) -> None:  # fmt: skip
    """Fill `folder`, not yet published (see `publish_folder`); longer texts than `max_tokens` are cut."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_beside(folder, config, tokenizer_from, max_tokens)
    if config.is_paired:
        tensors = _paired_tensors(config, tensors)
    save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_manifest(folder, "checkpoint", created_by)


def save_beside(folder: Path, config: TowersConfig, tokenizer_from: Path, max_tokens: int) -> None:
    """All that `folder` holds beside weights and manifest."""
    copy_tokenizer(tokenizer_from, folder)
    save_towers_config(folder, config)
    atomic_write_text(folder / LIMITS, json.dumps({"max_seq_length": max_tokens}) + "\n")


def load_towers(folder: Path) -> TwoTowers:
    """The towers in evaluation mode, on the CPU; every hash is checked, where a folder of Hugging Face has any.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    config = towers_config(folder)
    paired = config.is_paired
    if not paired or (folder / MANIFEST_NAME).exists():
        verify(folder)
    if paired:
        return _load_paired(folder, config).eval()
    try:
        tensors = load_file(folder / WEIGHTS)
        model = TwoTowers(config)
        model.load_state_dict(tensors)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error
    return model.eval()


def _load_paired(folder: Path, config: TowersConfig) -> TwoTowers:
    with torch.device("meta"):  # a damaged size may be a billion
        model = TwoTowers(config)
    names = {_paired_name(config, name): name for name in model.state_dict()}
    shapes = {
        theirs: torch.Size([1]) if _is_scalar(theirs, config) else model.state_dict()[ours].shape
        for theirs, ours in names.items()
    }
    found = {
        names[theirs]: tensor.reshape(()) if _is_scalar(theirs, config) else tensor
        for theirs, tensor in named_tensors(folder, shapes, _UNUSED)
    }
    model.load_state_dict(found, assign=True)
    return model.requires_grad_()


def _paired_tensors(config: TowersConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a `TwoTowers` as the file has it."""
    named = {_paired_name(config, name): tensor for name, tensor in tensors.items()}
    return {name: tensor.reshape(1) if _is_scalar(name, config) else tensor for name, tensor in named.items()}


def _paired_name(config: TowersConfig, name: str) -> str:
    """The name that Hugging Face gives to the parameter `name` of a `TwoTowers`."""
    names = _NAMES[config.loss]
    ours = next((prefix for prefix in names if name.startswith(prefix)), "")
    return names.get(ours, "") + name.removeprefix(ours)


def _is_scalar(theirs: str, config: TowersConfig) -> bool:
    """Whether a file has one number of one axis where we have none."""
    return config.loss == "siglip" and theirs in ("logit_scale", "logit_bias")
