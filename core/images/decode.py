"""Encoded images → pixels: one decoder for training, calibration and serving, so that all see the same numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels
from penjing.core.images.normalise import normalise
from penjing.core.images.tiles import cut

FORMATS = ("JPEG", "PNG")
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
_ORIENTATION, _TURNED = 0x0112, range(5, 9)  # the EXIF tag, and what swaps width and height
MAX_PIXELS = 50_000_000  # of one image: three bytes each while it is decoded
_Taken = TypeVar("_Taken")


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
    upright = _upright(data, pixels, max_pixels, formats, still)
    return _ordered(_fitted(upright, pixels, part), pixels)


def decode_tiles(data: bytes, pixels: Pixels, tiles: int, *, max_pixels: int = MAX_PIXELS) -> list[NDArray[np.uint8]]:
    """An encoded image as squares of the network's size, row by row, and then the whole; see `decode_image`.

    Args:
        pixels: of a square network, which is shown all of an image.
        tiles: to which the longer side is scaled; see `Look`.
    """
    upright = _upright(data, pixels, max_pixels, FORMATS, still=True)
    return [_ordered(each, pixels) for each in cut(upright, tiles, pixels.width, _FILTERS[pixels.filter])]


def upright_size(data: bytes, *, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """(width, height) of an encoded image once it is turned as its EXIF tag says, mostly by its first bytes alone.

    Raises:
        InputError: see `decode_image`.
    """

    def size(image: Image.Image) -> tuple[int, int]:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION) in _TURNED else (width, height)

    return _opened(data, max_pixels, FORMATS, False, size)


def _upright(data: bytes, pixels: Pixels, max_pixels: int, formats: Sequence[str], still: bool) -> Image.Image:
    def upright(image: Image.Image) -> Image.Image:
        turned = _opaque(_eight_bits(ImageOps.exif_transpose(image)))
        return turned.convert("L" if pixels.order == "L" else "RGB")

    return _opened(data, max_pixels, formats, still, upright)


def _opened(
    data: bytes, max_pixels: int, formats: Sequence[str], still: bool, take: Callable[[Image.Image], _Taken]
) -> _Taken:
    """What `take` makes of an encoded image; whatever that stumbles over is an `InputError`."""
    known = " or ".join(formats)
    try:
        with Image.open(io.BytesIO(data), formats=list(formats)) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise InputError(f"it has {width} x {height} pixels, at most {max_pixels:,} are decoded; shrink it")
            # A JPEG with several pictures is a photo of a phone beside its preview.
            if still and image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise InputError("it is animated; send one of its frames")
            return take(image)
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InputError(f"it is too large: {error}; at most {max_pixels:,} pixels are decoded") from None
    except Image.UnidentifiedImageError:
        raise InputError(f"it is no {known} image ({len(data)} bytes); encode it as one") from None
    except Exception as error:  # decoders raise whatever a broken file makes them stumble over
        raise InputError(f"it is a broken image ({type(error).__name__}: {error}); encode it again") from None


def _ordered(image: Image.Image, pixels: Pixels) -> NDArray[np.uint8]:
    values = np.asarray(image)
    if pixels.order == "L":
        return values[:, :, None]
    return values[:, :, ::-1] if pixels.order == "BGR" else values


def network_input(images: NDArray[np.uint8], pixels: Pixels, dtype: str = "float32") -> NDArray[Any]:
    """uint8 (…, height, width, channels), or (…, channels, height, width) where `pixels.layout` is NCHW, as the
    network's input: (value / scale - mean) / std, channel by channel, in the same axes."""
    axis = -3 if pixels.layout == "NCHW" else -1
    return normalise(images, pixels.mean, pixels.std, scale=pixels.scale, axis=axis).astype(dtype, copy=False)


def arranged(image: NDArray[np.uint8], pixels: Pixels) -> NDArray[np.uint8]:
    """(height, width, channels) in the layout of the network."""
    return image.transpose(2, 0, 1) if pixels.layout == "NCHW" else image


def _fitted(image: Image.Image, pixels: Pixels, part: tuple[float, ...] | None) -> Image.Image:
    """The middle of the scaled image, made from what it shows of the image: a long thin one is never scaled whole.

    Sizes and places are torchvision's (`Resize` of a number, `CenterCrop`): lengths are cut off to integers. With a
    border they are timm's (`ResizeKeepRatio` of the longest side, `CenterCropOrPad`): lengths are rounded.
    """
    rows, columns = _scaled(image.size, pixels)
    size = pixels.width, pixels.height
    across = _shown(columns, pixels.width, None if part is None else (part[1], part[3]))
    down = _shown(rows, pixels.height, None if part is None else (part[0], part[2]))
    inside = _within(*across, columns, pixels.width), _within(*down, rows, pixels.height)
    steps = image.size[0] / columns, image.size[1] / rows
    # Pillow scales while it averages, so that shrinking does not skip pixels.
    if pixels.fit != "border" or inside == ((0, pixels.width), (0, pixels.height)):
        box = _box(across, down, steps, image.size)
        return image.resize(size, _FILTERS[pixels.filter], box)
    canvas = Image.new(image.mode, size, _filling(pixels))
    (left, right), (top, bottom) = inside
    if left < right and top < bottom:  # a part of the image may lie in its border alone
        within = _cut(across, columns), _cut(down, rows)
        shown = image.resize((right - left, bottom - top), _FILTERS[pixels.filter], _box(*within, steps, image.size))
        canvas.paste(shown, (left, top))
    return canvas


def _scaled(size: tuple[int, int], pixels: Pixels) -> tuple[int, int]:
    """Rows and columns of the scaled image, out of which the middle is cut, or around which the border lies."""
    rows, columns = pixels.resize or (pixels.height, pixels.width)
    width, height = size
    if pixels.fit == "border":
        ratio = max(height / rows, width / columns)
        return max(1, round(height / ratio)), max(1, round(width / ratio))
    if pixels.fit == "cover":
        if columns * height >= rows * width:
            return max(rows, columns * height // width), columns
        return rows, max(columns, rows * width // height)
    return rows, columns


def _shown(scaled: int, wanted: int, part: tuple[float, float] | None) -> tuple[float, float]:
    """Where what is shown begins and ends along an axis of the scaled image; before 0 and after `scaled` is border."""
    first = round((scaled - wanted) / 2) if scaled >= wanted else -((wanted - scaled) // 2)
    begin, share = part or (0.0, 1.0)
    return first + begin * wanted, first + (begin + share) * wanted


def _within(begin: float, end: float, scaled: int, wanted: int) -> tuple[int, int]:
    """Which of the `wanted` pixels between `begin` and `end` show the image and no border."""
    step = (end - begin) / wanted
    return round((max(begin, 0) - begin) / step), round((min(end, scaled) - begin) / step)


def _cut(ends: tuple[float, float], scaled: int) -> tuple[float, float]:
    return max(ends[0], 0), min(ends[1], scaled)


def _box(
    across: tuple[float, float], down: tuple[float, float], steps: tuple[float, float], size: tuple[int, int]
) -> tuple[float, float, float, float]:
    """The part of the image, for Pillow; rounding must not lead out of it."""
    return (
        across[0] * steps[0],
        down[0] * steps[1],
        min(size[0], across[1] * steps[0]),
        min(size[1], down[1] * steps[1]),
    )


def _filling(pixels: Pixels) -> int | tuple[int, ...]:
    """The mean as a colour of an image, whose channels are RGB or grey."""
    colours = tuple(min(max(round(each * pixels.scale), 0), 255) for each in pixels.mean)
    return colours[0] if len(colours) == 1 else colours[::-1] if pixels.order == "BGR" else colours


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
