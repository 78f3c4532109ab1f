"""Images as people have them → upright pixels without a camera's notes; and how alike two of them look."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from penjing.core.errors import InputError
from penjing.curate.documents.needs import needed

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112  # of EXIF
_QUALITY = 95  # of JPEG that has to be stored again


@dataclass(frozen=True)
class Picture:
    """An image that is whole.

    Attributes:
        data, ending: the file to store, without EXIF, GPS, comments and profiles, "jpg" or "png".
        form: what the source was.
        look: (64,) bool, its perceptual hash.
    """

    data: bytes
    ending: str
    form: str
    width: int
    height: int
    look: NDArray[np.bool_]
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
    look = np.asarray(hashing.phash(pixels.convert("L")).hash, bool).ravel()
    changed = "turned, stored again" if turned else "stored again"
    return Picture(out.getvalue(), "jpg" if lossy else "png", form, *pixels.size, look, changed)


class Gallery:
    """Perceptual hashes that were met, to find those that are near."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._hashes = np.empty(1024, np.uint64)
        self._names: list[str] = []

    def twin(self, look: NDArray[np.bool_]) -> str | None:
        """The name of the first hash of which `most` bits or fewer differ from (64,) `look`; None: there is none."""
        away = np.bitwise_count(self._hashes[: len(self._names)] ^ _packed(look))
        near = np.flatnonzero(away <= self._most)
        return self._names[int(near[0])] if len(near) else None

    def add(self, look: NDArray[np.bool_], name: str) -> None:
        """Have `look` found from now on, as `name`."""
        if len(self._names) == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.empty_like(self._hashes)])
        self._hashes[len(self._names)] = _packed(look)
        self._names.append(name)


def hexadecimal(look: NDArray[np.bool_]) -> str:
    """(64,) bits as 16 digits."""
    return f"{int(_packed(look)):016x}"


def _packed(look: NDArray[np.bool_]) -> np.uint64:
    return np.packbits(look).view(">u8")[0].astype(np.uint64)
