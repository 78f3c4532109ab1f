"""Encoded images become pixels, or one clear error."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import arranged, decode_image, network_input

WANTED = Pixels(height=2, width=3, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))
GREY = Pixels(height=2, width=3, mean=(0.5,), std=(0.5,), order="L")
COLOURS = np.random.default_rng(0).integers(0, 256, (2, 3, 3), np.uint8)


def encoded(array: np.ndarray, form: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(file, form, **options)
    return file.getvalue()


def test_pixels_of_a_png_are_its_own_in_the_order_that_is_wanted() -> None:
    assert np.array_equal(decode_image(encoded(COLOURS), WANTED), COLOURS)
    turned = WANTED.model_copy(update={"order": "BGR"})
    assert np.array_equal(decode_image(encoded(COLOURS), turned), COLOURS[:, :, ::-1])
    assert decode_image(encoded(COLOURS), GREY).shape == (2, 3, 1)


def test_exif_says_how_an_image_is_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    data = encoded(np.rot90(COLOURS).copy(), exif=exif)
    assert np.array_equal(decode_image(data, WANTED), COLOURS)


@pytest.mark.parametrize(
    ("mode", "form"), [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("1", "PNG")]
)
def test_other_kinds_of_colours(mode: str, form: str) -> None:
    flat = np.full((40, 60, 3), 255, np.uint8)
    found = decode_image(encoded(flat, form, mode), WANTED)
    assert found.shape == (2, 3, 3)
    assert found.min() > 250


def test_sixteen_bits_of_grey_are_scaled() -> None:
    grey = np.array([[0, 256, 65535]] * 2, np.uint16)
    assert decode_image(encoded(grey), GREY)[0, :, 0].tolist() == [0, 1, 255]


def test_shrinking_averages() -> None:
    board = np.indices((64, 96)).sum(0) % 2 * 255
    found = decode_image(encoded(np.repeat(board[:, :, None], 3, 2).astype(np.uint8)), WANTED)
    assert np.abs(found.astype(int) - 127).max() < 4


def test_normalisation_is_of_each_channel_in_either_layout() -> None:
    expected = (COLOURS / 255 - np.array(WANTED.mean)) / np.array(WANTED.std)
    last = WANTED.model_copy(update={"layout": "NHWC"})
    assert np.allclose(network_input(arranged(COLOURS, last)[None], last), expected[None], atol=1e-6)
    found = network_input(arranged(COLOURS, WANTED)[None], WANTED, "float16")
    assert found.dtype == np.float16
    assert np.allclose(found[0].transpose(1, 2, 0), expected, atol=1e-3)


def png(width: int, height: int, depth: int, kind: int, body: bytes) -> bytes:
    """A PNG of raw rows, each behind a zero."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def huge(width: int, height: int) -> bytes:
    """A PNG that says it is huge, with nothing in it."""
    return png(width, height, 8, 2, b"")


def bare_jpeg(width: int, height: int) -> bytes:
    """The head of a JPEG of such a size, with nothing behind it."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes([1, 17, 0, 2, 17, 0, 3, 17, 0])
    return b"\xff\xd8\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame + b"\xff\xd9"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no JPEG or PNG image"),
        (b"not an image", "no JPEG or PNG image"),
        *((encoded(COLOURS, form), "no JPEG or PNG image") for form in ("BMP", "GIF", "TIFF", "WEBP", "PPM", "ICO")),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no JPEG or PNG image"),
        (encoded(np.zeros((50, 50, 3), np.uint8), "JPEG")[:-200], "broken image"),
        (encoded(COLOURS)[:45], "broken image"),
        (huge(2, 3), "broken image"),
        (huge(0, 3), "no JPEG or PNG image|broken image"),
        (huge(3, 0), "no JPEG or PNG image|broken image"),
        (bare_jpeg(0, 0), "no JPEG or PNG image|broken image"),
        (bare_jpeg(65_000, 65_000), "too large|65000 x 65000"),
        (huge(9000, 9000), "9000 x 9000 pixels"),
        (huge(10_000, 10_000), "too large"),
        (huge(200_000, 200_000), "too large"),
    ],
)
def test_what_is_no_image_broken_or_a_bomb_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_image(data, WANTED)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_file_that_is_cut_off_anywhere_is_one_error(form: str) -> None:
    noise = np.random.default_rng(2).integers(0, 256, (24, 24, 3), np.uint8)
    whole = encoded(noise, form)
    ends = {"PNG": 20, "JPEG": 2}[form]  # where all pixels are there, sums and marks of the end may be missing
    for length in range(0, len(whole) - ends, 41):
        with pytest.raises(InputError, match=r"no JPEG or PNG image|broken image"):
            decode_image(whole[:length], WANTED)


@pytest.mark.parametrize(("mode", "channels"), [("LA", 2), ("RGBA", 4), ("I;16", 1), ("RGB;16", 3)])
def test_channels_and_depths_that_a_network_does_not_have_are_converted(mode: str, channels: int) -> None:
    """Grey with transparency, colours with it, and 16 bits of each: what is seen is the colour on black or its upper
    bits."""
    values = np.full((4, 5, channels), 200, np.uint8)
    if mode.endswith(";16"):
        kind, rows = {1: 0, 3: 2}[channels], np.full((4, 5 * channels), 200 * 257, ">u2")
        body = b"".join(b"\0" + row.tobytes() for row in rows)
        data = png(5, 4, 16, kind, body)
    else:
        values[..., -1] = 255
        data = encoded(values.squeeze(), mode=mode)
    found = decode_image(data, WANTED)
    assert np.abs(found.astype(int) - 200).max() <= 1


def test_how_large_an_image_may_be_is_a_setting() -> None:
    with pytest.raises(InputError, match="at most 5 are decoded"):
        decode_image(encoded(COLOURS), WANTED, max_pixels=5)


@pytest.mark.parametrize("shape", [(61, 40, 3), (40, 61, 3), (33, 44, 3), (48, 48, 3), (20, 25, 3)])
@pytest.mark.parametrize("resize", [(24, 24), (20, 20)])
def test_covering_a_size_and_cutting_its_middle_is_what_transformers_does(
    shape: tuple[int, ...], resize: tuple[int, int]
) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    process: Any = CLIPImageProcessorPil(
        size={"shortest_edge": resize[0]}, crop_size={"height": 20, "width": 20}, do_rescale=False, do_normalize=False
    )
    expected = np.asarray(process(Image.fromarray(image)).pixel_values[0])
    means, ones = (0.0,) * 3, (1.0,) * 3
    pixels = Pixels(height=20, width=20, mean=means, std=ones, fit="cover", resize=resize, filter="bicubic")
    found = decode_image(encoded(image), pixels).transpose(2, 0, 1).astype(int)
    assert np.abs(found - expected).max() <= 2  # of noise; places within the image are 32-bit floats


@pytest.mark.parametrize("shape", [(64, 40, 3), (40, 64, 3), (36, 45, 3), (48, 40, 3), (6, 30, 3), (24, 8, 3)])
def test_a_border_is_what_pillow_pads_by(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    colour = (10, 128, 250)
    expected = ImageOps.pad(Image.fromarray(image), (20, 24), Image.Resampling.BICUBIC, colour)
    means = (10 / 255, 128 / 255, 250 / 255)
    pixels = Pixels(height=24, width=20, mean=means, std=(1.0,) * 3, fit="border", filter="bicubic")
    found = decode_image(encoded(image), pixels)
    assert np.abs(found.astype(int) - np.asarray(expected).astype(int)).max() <= 2
    turned = decode_image(encoded(image), pixels.model_copy(update={"order": "BGR", "mean": means[::-1]}))
    assert np.array_equal(turned[:, :, ::-1], found)


def test_a_border_may_be_cut_and_shown_in_part() -> None:
    image = encoded(np.full((20, 40, 3), 200, np.uint8))
    pixels = Pixels(height=16, width=16, mean=(0.0,) * 3, std=(1.0,) * 3, fit="border", resize=(20, 20))
    found = decode_image(image, pixels)[:, :, 0]  # 10 x 20 once scaled, of which 16 columns are left
    assert found[:, 0].tolist() == [0] * 3 + [200] * 10 + [0] * 3
    assert (found == found[:, :1]).all()
    upper = decode_image(image, pixels, part=(0.0, 0.0, 0.5, 1.0))[:, :, 0]
    assert upper[:, 0].tolist() == [0] * 6 + [200] * 10
    assert not decode_image(image, pixels, part=(0.0, 0.3, 0.15, 0.5)).any()


def test_a_hair_is_never_scaled_to_nothing() -> None:
    pixels = Pixels(height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3, fit="border")
    found = decode_image(encoded(np.full((1, 4000, 3), 9, np.uint8)), pixels)
    assert (found[:, :, 0].max(1) == 9).sum() == 1


def test_a_stretched_image_loses_its_border() -> None:
    image = np.zeros((64, 96, 3), np.uint8)
    image[8:56, 12:84] = 200
    pixels = Pixels(height=24, width=24, mean=(0.0,) * 3, std=(1.0,) * 3, resize=(32, 32))
    found = decode_image(encoded(image), pixels)
    assert found.shape == (24, 24, 3)
    assert (found[1:-1, 1:-1] == 200).all()


def test_a_thin_image_is_never_scaled_whole() -> None:
    pixels = WANTED.model_copy(update={"height": 1000, "width": 1000, "fit": "cover"})
    data = encoded(np.full((1, 40_000, 3), 7, np.uint8))  # 40 million pixels tall and wide, were it scaled whole
    found = decode_image(data, pixels)
    assert found.shape == (1000, 1000, 3)
    assert (found == 7).all()


def test_a_middle_larger_than_the_image_it_is_cut_from_is_refused() -> None:
    with pytest.raises(ValueError, match="resize is 20x20, out of which 24x24 are cut"):
        Pixels(height=24, width=24, mean=(0.0,) * 3, std=(1.0,) * 3, resize=(20, 20))
