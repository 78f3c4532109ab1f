"""Checkpoint folders of image classifiers: `config.json` (architecture, labels, normalisation), safetensors,
`penjing.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object, verify, write_manifest
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig

_WEIGHTS = "model.safetensors"


class VisionConfig(Config):
    """Content of `config.json`. An image enters the model as (pixel / 255 - mean) / std, per channel."""

    task: Literal["image-classification"] = "image-classification"
    model: ResNetConfig
    image_size: tuple[int, int]  # height, width
    mean: tuple[float, ...]
    std: tuple[float, ...]
    labels: tuple[str, ...] = Field(min_length=1)


def save_vision_checkpoint(folder: Path, config: VisionConfig, model: nn.Module, created_by: dict[str, Any]) -> None:
    """Fill `folder`, not yet published (see `publish_folder`); tensors are stored contiguous, under the module's
    names."""
    atomic_write_text(folder / "config.json", json.dumps(config.model_dump(), indent=2) + "\n")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / _WEIGHTS)
    write_manifest(folder, "checkpoint", created_by)


def load_vision_checkpoint(folder: Path) -> tuple[ResNet, VisionConfig]:
    """The model in evaluation mode, on the CPU, and its config; every hash is checked.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    values = read_json_object(folder / "config.json")
    if values.get("task") != "image-classification":
        raise InputError(f"{folder} is no image classifier (its config.json has task {values.get('task')!r})")
    verify(folder)
    try:
        config = parse_config(VisionConfig, values, str(folder / "config.json"))
        tensors = load_file(folder / _WEIGHTS)
        model = ResNet(config.model)
        model.load_state_dict(tensors)
    except (ConfigError, SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error
    return model.eval(), config
