"""Folders of a decoder as others write them, with one thing changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[dict[str, torch.Tensor]], object]
UP = "model.layers.1.mlp.up_proj.weight"


def changed_model(checkpoint: Path, folder: Path, damage: Damage) -> Path:
    """A Hugging Face folder without penjing.json, so that hashes do not catch the damage first."""
    tensors = load_file(checkpoint / "model.safetensors")
    damage(tensors)
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("penjing.json", "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    return folder
