"""Images as people have them → upright pixels without a camera's notes; and how alike two of them look."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from penjing.core.errors import InputError
from penjing.curate.documents.needs import needed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112  # of EXIF
_QUALITY = 95  # of JPEG that has to be stored again
_CUT = 0.05  # of width and height, that a copy may lack
_VIEWS = tuple((x / 2 * _CUT, y / 2 * _CUT) for y in range(3) for x in range(3))  # where what is left may begin
_SMALL = 256  # pixels of a side that views are cut from
NUM_HASHES = 1 + len(_VIEWS)
_THUMB, _SEEN = 32, 24  # pixels of what is kept of an image, and of what is compared
THUMB_SHAPE = (_THUMB, _THUMB, 3)
_FARTHER = 4  # bits more than for whole images that hashes of views may differ in
_ALIKE, _ALIKE_CUT = 0.98, 0.95  # correlation of the pixels of two that are one: whole, and one cut out of the other


@dataclass(frozen=True)
class Appearance:
    """What images are compared by.

    Attributes:
        look: (64,) bool, the perceptual hash.
        views: (9,) uint64, those of the parts that are left when 5 % of width and height are cut off.
        thumb: (32, 32, 3) uint8, the image in small.
    """

    look: NDArray[np.bool_]
    views: NDArray[np.uint64]
    thumb: NDArray[np.uint8]

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """(10,) of the whole, and of its parts."""
        return np.array([_packed(self.look), *self.views], np.uint64)


def appearance_of(hashes: NDArray[np.uint64], thumb: NDArray[np.uint8]) -> Appearance:
    """The one whose `hashes` these are."""
    return Appearance(np.unpackbits(hashes[:1].astype(">u8").view(np.uint8)).astype(bool), hashes[1:], thumb)


@dataclass(frozen=True)
class Picture(Appearance):
    """An image that is whole.

    Attributes:
        data, ending: the file to store, without EXIF, GPS, comments and profiles, "jpg" or "png".
        form: what the source was.
    """

    data: bytes
    ending: str
    form: str
    width: int
    height: int
    changed: str


def read_picture(content: bytes, max_pixels: int) -> Picture:
    """The image in `content`, upright and without metadata.

    Raises:
        InputError: no image of `FORMATS`, broken, cut off, animated, of more than 8 bits, or of more than `max_pixels`,
            which is found out before it is decoded.
        SetupError: imagehash is not installed.
    """
    hashing = needed("imagehash")
    Image.init()  # else Pillow does not know the rarer of `FORMATS` yet
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=list(FORMATS)) as image:
            warnings.simplefilter("ignore")  # of Pillow, about odd metadata that is removed here
            form, (width, height) = str(image.format), image.size
            if width * height > max_pixels:
                raise InputError(f"has {width} x {height} pixels, more than {max_pixels:,}")
            if form != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise InputError("is animated")
            if image.mode in ("I", "F") or image.mode.startswith("I;"):
                raise InputError("has more than 8 bits a channel")
            turned = image.getexif().get(_ORIENTATION, 1) not in (0, 1)
            upright = ImageOps.exif_transpose(image)
            clear = upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info
            wanted = "RGBA" if clear else "L" if upright.mode in ("L", "1") else "RGB"
            pixels = upright.convert(wanted)
    except InputError:
        raise
    except Image.DecompressionBombError as error:
        raise InputError(f"is too large: {error}") from None
    except Image.UnidentifiedImageError:
        raise InputError("is no image that is read here") from None
    except Exception as error:  # decoders raise whatever a broken file makes them stumble over
        raise InputError(f"is broken ({type(error).__name__}: {error})") from None
    pixels.info.clear()  # Pillow would store comments and profiles again
    out = io.BytesIO()
    lossy = form in ("JPEG", "MPO") and wanted != "RGBA"
    if lossy:
        pixels.save(out, "JPEG", quality=_QUALITY, subsampling=0)
    else:
        pixels.save(out, "PNG")
    grey = pixels.convert("L")
    look = np.asarray(hashing.phash(grey).hash, bool).ravel()
    changed = "turned, stored again" if turned else "stored again"
    views, thumb = _views(pixels, grey, hashing.phash)
    return Picture(look, views, thumb, out.getvalue(), "jpg" if lossy else "png", form, *pixels.size, changed)


def _views(
    pixels: Image.Image, grey: Image.Image, phash: Callable[[Image.Image], Any]
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """(Hashes of the parts, the image in small)."""
    grey = grey.resize((min(_SMALL, grey.width), min(_SMALL, grey.height)), Image.Resampling.BOX)
    found = np.empty(len(_VIEWS), np.uint64)
    for x in {x for x, _ in _VIEWS}:  # rows first, as Pillow does, and once for the parts that begin at one column
        box = (x * grey.width, 0, (x + 1 - _CUT) * grey.width, grey.height)
        rows = grey.resize((_THUMB, grey.height), Image.Resampling.LANCZOS, box=box)
        for place in (place for place, view in enumerate(_VIEWS) if view[0] == x):
            y = _VIEWS[place][1]
            box = (0, y * grey.height, _THUMB, (y + 1 - _CUT) * grey.height)
            part = rows.resize((_THUMB, _THUMB), Image.Resampling.LANCZOS, box=box)  # the size that the hash is of
            found[place] = _packed(np.asarray(phash(part).hash, bool).ravel())
    small = pixels.convert("RGB").resize((2 * _THUMB, 2 * _THUMB), Image.Resampling.BOX)
    return found, np.asarray(small.resize((_THUMB, _THUMB), Image.Resampling.BOX))


class Gallery:
    """What was met of images, to find those that look alike: by perceptual hashes first, of whole images and of one
    beside parts of the other, and then by their pixels in small. 3.2 kB an image.

    Args:
        most: bits of 64 that hashes of whole images may differ in; -1 finds none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes = np.empty((1024, NUM_HASHES), np.uint64)  # of the whole, and of its parts
        self._names: list[str] = []
        self._thumbs: list[NDArray[np.uint8]] = []

    def twin(self, picture: Appearance) -> str | None:
        """The name of the first image that looks like `picture`; None: there is none."""
        if self._most < 0:
            return None
        known = self._hashes[: len(self._names)]
        whole = _packed(picture.look)
        near = np.bitwise_count(known ^ whole)  # the stored ones and their parts beside the new one
        parts = np.bitwise_count(known[:, :1] ^ picture.views)  # and its parts beside them
        limits = np.full(near.shape[1], self._most + _FARTHER)
        limits[0] = self._most
        hits = (near <= limits).any(1) | (parts <= self._most + _FARTHER).any(1)
        for place in np.flatnonzero(hits).tolist():
            old, new = self._thumbs[place], picture.thumb
            if near[place, 0] <= self._most and _correlation(_cut(old, None), _cut(new, None)) >= _ALIKE:
                return self._names[place]
            for view in range(len(_VIEWS)):
                for distance, large, small in ((near[place, 1 + view], old, new), (parts[place, view], new, old)):
                    if (
                        distance <= self._most + _FARTHER
                        and _correlation(_cut(large, _VIEWS[view]), _cut(small, None)) >= _ALIKE_CUT
                    ):
                        return self._names[place]
        return None

    def add(self, picture: Appearance, name: str) -> None:
        """Have `picture` found from now on, as `name`."""
        if len(self._names) == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
        self._hashes[len(self._names)] = picture.hashes
        self._names.append(name)
        self._thumbs.append(picture.thumb)


def _cut(thumb: NDArray[np.uint8], view: tuple[float, float] | None) -> NDArray[np.float32]:
    """(24, 24, 3) the whole of an image in small, or what is left of it from `view` on."""
    x, y, side = (*view, 1 - _CUT) if view is not None else (0.0, 0.0, 1.0)
    box = (x * _THUMB, y * _THUMB, (x + side) * _THUMB, (y + side) * _THUMB)
    return np.asarray(Image.fromarray(thumb).resize((_SEEN, _SEEN), Image.Resampling.BILINEAR, box=box), np.float32)


def _correlation(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Of two images' pixels, each channel less its mean; 1.0 where both are of one colour, the same."""
    one, other = (each.reshape(-1, 3) - each.reshape(-1, 3).mean(0) for each in (first, second))
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    if size < 1e-3:
        return float(np.abs(first - second).max() < 1)
    return float((one * other).sum()) / size


def hexadecimal(look: NDArray[np.bool_]) -> str:
    """(64,) bits as 16 digits."""
    return f"{int(_packed(look)):016x}"


def _packed(look: NDArray[np.bool_]) -> np.uint64:
    return np.packbits(look).view(">u8")[0].astype(np.uint64)
