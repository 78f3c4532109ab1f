"""What a graph's inputs and outputs are, without torch: the content of its `config.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.manifest import read_json_object
from penjing.core.progress import plural

Meaning = Literal["tensors", "classes", "embedding"]
DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")

Fit = Literal["stretch", "cover", "border"]
FIT = (
    "What becomes of an image of another shape: stretch scales it to a size whatever its shape; cover keeps its shape, "
    "and scales it until it just covers that size; border keeps it, too, scales it until all of it is inside, and "
    "fills "
)
RESIZE = "Rows and columns of that size, out of which the middle of height x width is cut; none: these."
Filter = Literal["bilinear", "bicubic", "lanczos"]
_SIDE = 1 << 14  # pixels


class TensorSpec(Config):
    """An input or an output of a network."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:/-]{0,199}$", description="Its name, which servers show too.")
    dtype: Literal[DTYPE_NAMES] = Field(description="Type of its elements.")  # type: ignore[valid-type]
    shape: tuple[int | str, ...] = Field(
        description="Size of each axis; a name stands for a size that may differ from call to call, such as batch."
    )

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


class Pixels(Config):
    """How an image becomes the input: scaled, its middle cut out, then (value / 255 - mean) / std for each channel."""

    height: int = Field(ge=1, le=_SIDE, description="Rows of an image.")
    width: int = Field(ge=1, le=_SIDE, description="Columns of an image.")
    mean: tuple[float, ...] = Field(min_length=1, max_length=4, description="Mean of each channel, from 0 to 1.")
    std: tuple[float, ...] = Field(min_length=1, max_length=4, description="Standard deviation of each channel.")
    layout: Literal["NCHW", "NHWC"] = Field(default="NCHW", description="Where the channels stand.")
    order: Literal["RGB", "BGR", "L"] = Field(default="RGB", description="Order of the channels; L is grey.")
    scale: float = Field(default=255.0, gt=0, description="What a pixel is divided by before mean and std.")
    fit: Fit = Field(default="stretch", description=FIT + "the rest with the mean.")
    resize: tuple[int, int] | None = Field(default=None, description=RESIZE)
    filter: Filter = Field(default="bilinear", description="How pixels between are found.")

    @model_validator(mode="after")
    def _channels(self) -> Self:
        channels = 1 if self.order == "L" else 3
        if len(self.mean) != channels or len(self.std) != channels:
            raise ValueError(
                f"{self.order} images have {plural(channels, 'channel')}, so mean and std need "
                f"{plural(channels, 'number')}"
            )
        if not all(value > 0 for value in self.std):
            raise ValueError("each std must be above 0")
        rows, columns = self.resize or (self.height, self.width)
        if not (self.height <= rows <= _SIDE and self.width <= columns <= _SIDE):
            raise ValueError(
                f"resize is {rows}x{columns}, out of which {self.height}x{self.width} are cut; it must be at least as "
                f"large, and at most {_SIDE} a side"
            )
        return self


class GraphConfig(Config):
    """Content of `config.json` of a graph's checkpoint or artifact."""

    penjing_family: Literal["graph"] = Field(default="graph", description="The family of networks.")
    schema_version: Literal[1] = Field(default=1, description="Version of this format.")
    inputs: tuple[TensorSpec, ...] = Field(min_length=1, description="What the network takes, in order.")
    outputs: tuple[TensorSpec, ...] = Field(min_length=1, description="What it gives, in order.")
    meaning: Meaning = Field(default="tensors", description="What the first output holds.")
    labels: tuple[str, ...] = Field(default=(), description="Name of each class, where the first output has classes.")
    pixels: Pixels | None = Field(default=None, description="How images become the first input; none: no images.")

    @property
    def batched(self) -> bool:
        """Whether axis 0 of every input and output is one and the same dynamic axis."""
        axes = {spec.shape[0] if spec.shape else None for spec in (*self.inputs, *self.outputs)}
        return len(axes) == 1 and isinstance(axes.pop(), str)


def graph_config(folder: Path) -> GraphConfig:
    """The content of a graph's `config.json`.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    if (family := family_of(folder)) != "graph":
        raise InputError(
            f"{folder} is of the family {family!r}, and no graph; 'penjing import' makes one of any network"
        )
    try:
        return parse_config(GraphConfig, read_json_object(folder / "config.json"), str(folder / "config.json"))
    except ConfigError as error:
        raise InputError(f"{folder} cannot be loaded: {error}; import the network again") from error
