"""Large images as squares of the network's size beside the whole, as Idefics3's and SmolVLM's processors cut them
(Laurençon et al., https://arxiv.org/abs/2408.12637, section 3.2)."""

from __future__ import annotations

import math
from typing import NamedTuple

from PIL import Image
from pydantic import Field

from penjing.core.config import Config
from penjing.core.graph.config import Filter, Fit
from penjing.core.images.sound import Sound

MOST_A_SIDE = 8  # squares: SmolVLM has 4


class Look(Config):
    """How a decoder that sees is shown an image; see `Pixels`."""

    mean: tuple[float, ...] = Field(default=(), description="Mean of each channel, from 0 to 1; none: 0.5.")
    std: tuple[float, ...] = Field(default=(), description="Standard deviation of each channel; none: 0.5.")
    fit: Fit = Field(default="stretch", description="What becomes of an image of another shape.")
    resize: tuple[int, int] | None = Field(default=None, description="Its size before its middle is cut out.")
    filter: Filter = Field(default="bilinear", description="How pixels between are found when it is scaled.")
    tiles: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Its longer side is scaled to this, and squares are cut from it beside the whole; 0: no squares.",
    )
    sound: Sound | None = Field(
        default=None, description="It is a recording, of which the network sees a spectrogram; none: it is an image."
    )


class Grid(NamedTuple):
    """How many squares an image is cut into; none of both: it is seen whole alone."""

    rows: int
    columns: int

    @property
    def pieces(self) -> int:
        """Images that the network gets, the whole one included."""
        return self.rows * self.columns + 1


UNCUT = Grid(0, 0)


def grid_of(size: tuple[int, int], tiles: int, side: int) -> Grid:
    """Of an image of (width, height) pixels; `side` of a square."""
    if not tiles:
        return UNCUT
    return _grid(_in_squares(_longest(size, tiles), side), side)


def cut(image: Image.Image, tiles: int, side: int, how: Image.Resampling) -> list[Image.Image]:
    """The squares row by row, then the whole image, each of `side` pixels a side."""
    scaled = image.resize(_longest(image.size, tiles), how)
    image = scaled.resize(_in_squares(scaled.size, side), how)
    grid = _grid(image.size, side)
    corners = [(side * column, side * row) for row in range(grid.rows) for column in range(grid.columns)]
    squares = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    return [*squares, image.resize((side, side), how)]


def _grid(size: tuple[int, int], side: int) -> Grid:
    width, height = size
    return UNCUT if width == height == side else Grid(height // side, width // side)


def _longest(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """(width, height) with a longer side of `longest`; the other one is rounded up to an even number."""
    width, height = size
    shape = width / height
    if width >= height:
        return longest, max(1, _even(int(longest / shape)))
    return max(1, _even(int(longest * shape))), longest


def _in_squares(size: tuple[int, int], side: int) -> tuple[int, int]:
    """The next (width, height) that squares fill, by the longer side first."""
    width, height = size
    shape = width / height
    if width >= height:
        width = _filled(width, side)
        return width, _filled(int(width / shape), side)
    height = _filled(height, side)
    return _filled(int(height * shape), side), height


def _filled(length: int, side: int) -> int:
    return max(1, math.ceil(length / side)) * side  # where rounding leaves nothing of a thin image, one square


def _even(length: int) -> int:
    return length + length % 2
