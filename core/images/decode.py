"""Encoded images → pixels: one decoder for training, calibration and serving, so that all see the same numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels

FORMATS = ("JPEG", "PNG")
_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
MAX_PIXELS = 50_000_000  # of one image: three bytes each while it is decoded


def decode_image(
    data: bytes,
    pixels: Pixels,
    *,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
    still: bool = False,
    part: tuple[float, ...] | None = None,
) -> NDArray[np.uint8]:
    """An encoded image as the pixels that a network wants, turned as its EXIF tag says.

    Args:
        data: the file's content.
        max_pixels: a larger image is refused before it is decoded.
        formats: Pillow's names of what is read.
        still: an animated image is refused; else its first frame is taken.
        part: what is shown of that which the network would see: top, left, height and width as shares of it.

    Returns:
        uint8, (height, width, channels) of `pixels`, in its order of channels.

    Raises:
        InputError: no image of these formats, broken, cut off, or too large.
    """
    known = " or ".join(formats)
    try:
        with Image.open(io.BytesIO(data), formats=list(formats)) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise InputError(f"it has {width} x {height} pixels, at most {max_pixels:,} are decoded; shrink it")
            # A JPEG with several pictures is a photo of a phone beside its preview.
            if still and image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise InputError("it is animated; send one of its frames")
            upright = _opaque(_eight_bits(ImageOps.exif_transpose(image)))
            values = np.asarray(_fitted(upright.convert("L" if pixels.order == "L" else "RGB"), pixels, part))
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"it is too large: {error}; at most {max_pixels:,} pixels are decoded") from None
    except Image.UnidentifiedImageError:
        raise InputError(f"it is no {known} image ({len(data)} bytes); encode it as one") from None
    except Exception as error:  # decoders raise whatever a broken file makes them stumble over
        raise InputError(f"it is a broken image ({type(error).__name__}: {error}); encode it again") from None
    if pixels.order == "L":
        return values[:, :, None]
    return values[:, :, ::-1] if pixels.order == "BGR" else values


def network_input(images: NDArray[np.uint8], pixels: Pixels, dtype: str = "float32") -> NDArray[Any]:
    """uint8 (…, height, width, channels), or (…, channels, height, width) where `pixels.layout` is NCHW, as the
    network's input: (value / scale - mean) / std, channel by channel, in the same axes."""
    shape = (-1, 1, 1) if pixels.layout == "NCHW" else (-1,)
    mean, std = (np.array(values, np.float32).reshape(shape) for values in (pixels.mean, pixels.std))
    return ((images.astype(np.float32) / np.float32(pixels.scale) - mean) / std).astype(dtype, copy=False)


def arranged(image: NDArray[np.uint8], pixels: Pixels) -> NDArray[np.uint8]:
    """(height, width, channels) in the layout of the network."""
    return image.transpose(2, 0, 1) if pixels.layout == "NCHW" else image


def _fitted(image: Image.Image, pixels: Pixels, part: tuple[float, ...] | None) -> Image.Image:
    """The middle of the scaled image, made from what it shows of the image: a long thin one is never scaled whole.

    Sizes and places are torchvision's (`Resize` of a number, `CenterCrop`): lengths are cut off to integers.
    """
    rows, columns = pixels.resize or (pixels.height, pixels.width)
    width, height = image.size
    if pixels.fit == "cover":
        if columns * height >= rows * width:
            rows = max(rows, columns * height // width)
        else:
            columns = max(columns, rows * width // height)
    top, left = round((rows - pixels.height) / 2), round((columns - pixels.width) / 2)
    across, down = width / columns, height / rows
    box = (
        left * across,
        top * down,
        min(width, (left + pixels.width) * across),
        min(height, (top + pixels.height) * down),
    )
    if part is not None:
        x, y, wide, tall = box[0], box[1], box[2] - box[0], box[3] - box[1]
        box = (
            x + part[1] * wide,
            y + part[0] * tall,
            min(width, x + (part[1] + part[3]) * wide),
            min(height, y + (part[0] + part[2]) * tall),
        )
    # Pillow scales while it averages, so that shrinking does not skip pixels.
    return image.resize((pixels.width, pixels.height), _FILTERS[pixels.filter], box)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits as grey of 8: Pillow would cut its values off at 255."""
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))


def _opaque(image: Image.Image) -> Image.Image:
    """What is transparent becomes white: the colour that a file keeps there means nothing, and nobody has seen it."""
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
