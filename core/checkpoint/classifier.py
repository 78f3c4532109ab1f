"""Checkpoint folders of image classifiers: `config.json` (architecture, labels, normalisation), safetensors,
`penjing.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from penjing.core.checkpoint.classifier_config import ClassifierConfig, classifier_config, save_classifier_config
from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import InputError
from penjing.core.manifest import verify, write_manifest
from penjing.core.models.resnet import ResNet

WEIGHTS = "model.safetensors"


def save_classifier(folder: Path, config: ClassifierConfig, model: nn.Module, created_by: dict[str, Any]) -> None:
    """Fill `folder`, not yet published (see `publish_folder`); tensors are stored contiguous, under the module's
    names."""
    save_classifier_config(folder, config)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_tensors(tensors, folder / WEIGHTS)
    write_manifest(folder, "checkpoint", created_by)


def load_classifier(folder: Path) -> tuple[ResNet, ClassifierConfig]:
    """The model in evaluation mode, on the CPU, and its config; every hash is checked.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    config = classifier_config(folder)
    verify(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
        model = ResNet(config.model)
        model.load_state_dict(tensors)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error
    return model.eval(), config


def classifier_skeleton(folder: Path) -> tuple[ResNet, ClassifierConfig]:
    """The model without storage (device "meta"), in evaluation mode, and its config; no weight is read.

    Raises:
        InputError: missing, damaged, of another kind, or with other tensors than `config.json` promises.
    """
    config = classifier_config(folder)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error
    with torch.device("meta"):
        model = ResNet(config.model).eval()
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if odd := sorted(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name)):
        shapes = f"{stored.get(odd[0], 'missing')}, config.json asks for {expected.get(odd[0], 'none')}"
        raise InputError(f"{folder}: {odd[0]} is {shapes}; make it again")
    return model, config
