"""`config.json` of an image classifier's checkpoint or artifact: architecture, labels, normalisation. Without torch, so
that serving an artifact needs none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.graph.config import FIT, RESIZE, Filter, Fit, Pixels
from penjing.core.manifest import read_json_object
from penjing.core.models.resnet_config import ResNetConfig


class ClassifierConfig(Config):
    """Content of `config.json`. An image enters the model as (pixel / 255 - mean) / std, per channel."""

    task: Literal["image-classification"] = Field(default="image-classification", description="What the network does.")
    model: ResNetConfig = Field(description="Its architecture.")
    image_size: tuple[int, int] = Field(description="Height and width of an image in pixels.")
    mean: tuple[float, ...] = Field(
        description="Mean of each channel, of values from 0 to 1; subtracted from an image."
    )
    std: tuple[float, ...] = Field(description="Standard deviation of each channel, by which it is then divided.")
    labels: tuple[str, ...] = Field(min_length=1, description="Name of each class, in the order of the logits.")
    fit: Fit = Field(default="stretch", description=FIT + "the rest with grey.")
    resize: tuple[int, int] | None = Field(default=None, description=RESIZE)
    filter: Filter = Field(default="bilinear", description="How pixels between are found.")

    def pixels(self) -> Pixels:
        """How an image of any size becomes one of this network's, before it is normalised."""
        return fitted_pixels(self.image_size, self.model.in_channels, self.fit, self.resize, self.filter)


def fitted_pixels(
    size: tuple[int, int], channels: int, fit: Fit, resize: tuple[int, int] | None, filter_: Filter
) -> Pixels:
    """How an image of any size becomes one of `size` (rows, columns) and `channels`, 1 or 3; its border is grey.

    Raises:
        ConfigError: `resize` is smaller than `size`.
    """
    values = {"height": size[0], "width": size[1], "fit": fit, "resize": resize, "filter": filter_}
    values |= {"mean": (0.5,) * channels, "std": (1.0,) * channels, "order": "L" if channels == 1 else "RGB"}
    return parse_config(Pixels, values, "images")


def save_classifier_config(folder: Path, config: ClassifierConfig) -> None:
    """Write `config.json`."""
    atomic_write_text(folder / "config.json", json.dumps(config.model_dump(), indent=2) + "\n")


def classifier_config(folder: Path) -> ClassifierConfig:
    """The content of a classifier's `config.json`.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    values = read_json_object(folder / "config.json")
    if values.get("task") != "image-classification":
        raise InputError(f"{folder} is no image classifier (its config.json has task {values.get('task')!r})")
    try:
        return parse_config(ClassifierConfig, values, str(folder / "config.json"))
    except ConfigError as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error
