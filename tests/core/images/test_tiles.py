"""Images cut into squares, against transformers' processor of SmolVLM in Pillow."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import decode_tiles, upright_size
from penjing.core.images.tiles import UNCUT, Grid, grid_of

SIDE, LONGEST = 16, 64
PIXELS = Pixels(height=SIDE, width=SIDE, mean=(0.5,) * 3, std=(0.5,) * 3, filter="lanczos")


def encoded(width: int, height: int, **options: Any) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(
        size={"longest_edge": LONGEST}, max_image_size={"longest_edge": SIDE}, do_normalize=False, do_rescale=False
    )


@pytest.mark.parametrize(
    "size", [(64, 64), (33, 50), (50, 33), (7, 100), (300, 20), (1, 1), (5, 5), (200, 131), (1, 90)]
)
def test_squares_are_those_of_transformers(theirs: Any, size: tuple[int, int]) -> None:
    data = encoded(*size)
    said = theirs([Image.open(io.BytesIO(data))], return_row_col_info=True)
    wanted = np.stack(said["pixel_values"][0]).transpose(0, 2, 3, 1)
    grid = grid_of(size, LONGEST, SIDE)
    assert grid == (said["rows"][0][0], said["cols"][0][0])
    assert grid.pieces == len(wanted)
    np.testing.assert_array_equal(np.stack(decode_tiles(data, PIXELS, LONGEST)), wanted)


def test_an_image_that_fills_one_square_is_not_cut() -> None:
    assert grid_of((30, 30), SIDE, SIDE) == UNCUT
    assert UNCUT.pieces == 1
    assert len(decode_tiles(encoded(30, 30), PIXELS, SIDE)) == 1
    assert grid_of((3000, 20), 0, SIDE) == UNCUT


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60_000), st.integers(1, 60_000), st.integers(1, 100), st.integers(1, 8))
def test_no_image_has_more_squares_than_its_longest_side_allows(width: int, height: int, side: int, times: int) -> None:
    grid = grid_of((width, height), times * side, side)
    assert max(grid) <= times + 1
    assert (grid == UNCUT) == (min(grid) == 0)


def test_a_turned_photo_is_measured_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert upright_size(encoded(40, 10, exif=exif)) == (10, 40)
    assert upright_size(encoded(40, 10)) == (40, 10)


def test_what_cannot_be_read_is_one_line() -> None:
    for data, said in ((b"", "is no JPEG or PNG"), (encoded(9, 9)[:20], "broken|is no JPEG")):
        with pytest.raises(InputError, match=said):
            upright_size(data)
    with pytest.raises(InputError, match="at most 80 are decoded"):
        upright_size(encoded(9, 9), max_pixels=80)


def test_a_grid_counts_the_whole_image() -> None:
    assert Grid(2, 3).pieces == 7
