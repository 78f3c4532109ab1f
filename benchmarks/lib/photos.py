"""Photographs that come with free packages, cut into squares: some to calibrate on, others that nobody looked at.

    pip download --no-deps scikit-image==0.26.0 scikit-learn==1.9.1     # apt-get download mate-backgrounds
    unzip -d build/sources -q 'scikit_*.whl' 'skimage/data/*' 'sklearn/datasets/images/*'
    dpkg-deb -x mate-backgrounds_*.deb build/sources

Backgrounds of MATE's folder "nature" and scikit-learn's two photographs are held out, the others calibrate. A training
sees more: `apt-get download lomiri-wallpapers-16.04 lomiri-wallpapers-20.04 ukui-wallpapers`, unpacked in the same way.

    git clone https://github.com/EliSchwartz/imagenet-sample-images
    git clone https://github.com/ajschumacher/imagen

are 2000 pictures of ImageNet, one of each of its classes and five of each of 200 others, for `cut_pictures`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from penjing.core.errors import InputError

SKIMAGE = (
    *("astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "hubble_deep_field", "moon"),
    *("motorcycle_left", "retina", "rocket"),
)
MORE = ("usr", "share", "backgrounds")  # where Lomiri's and UKUI's photographs lie
SUFFIXES = (".jpg", ".jpeg", ".png")
SIZE, SMALLEST, LARGEST = 256, 200, 1400  # pixels
SHORTER, LONGER = 288, 384  # of a picture, at most
HELD_EVERY = 8


def cut_photos(sources: Path, out: Path) -> tuple[Path, Path]:
    """Write `out`/seen and `out`/held: squares of random places and sizes, the same each time.

    Raises:
        InputError: the packages are not there.
    """
    seen, held = _photographs(sources)
    return _squares(seen, out / "seen", 8), _squares(held, out / "held", 16)


def cut_training(sources: Path, out: Path, each: int) -> Path:
    """Write `out`: `each` squares of every photograph that is not held out, the same each time.

    Raises:
        InputError: the packages are not there.
    """
    seen, _ = _photographs(sources)
    more = [path for path in sorted(sources.joinpath(*MORE).iterdir()) if path.suffix in SUFFIXES]
    return _squares(seen + more, out, each)


def cut_pictures(folders: Sequence[Path], out: Path) -> tuple[Path, Path]:
    """Write `out`/seen and `out`/held: the pictures in `folders`, scaled, every eighth held out; none twice.

    Raises:
        InputError: there are none.
    """
    found = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise InputError(f"{', '.join(map(str, folders))}: there are no pictures; see benchmarks/lib/photos.py")
    known = set[bytes]()
    for name in ("seen", "held"):
        (out / name).mkdir(parents=True)
    for index, path in enumerate(found):
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        grey = np.asarray(image.resize((9, 8)).convert("L")).astype(np.int16)
        if (likeness := (grey[:, 1:] > grey[:, :-1]).tobytes()) in known:
            continue
        known.add(likeness)
        share = SHORTER / min(image.size)
        width, height = (max(SHORTER, round(side * share)) for side in image.size)
        wide, tall = min(width, LONGER), min(height, LONGER)
        left, top = (width - wide) // 2, (height - tall) // 2
        image = image.resize((width, height)).crop((left, top, left + wide, top + tall))
        image.save(out / ("seen" if index % HELD_EVERY else "held") / f"{path.stem}.jpg", quality=92)
    return out / "seen", out / "held"


def _photographs(sources: Path) -> tuple[list[Path], list[Path]]:
    files = sorted(path for path in sources.rglob("*") if path.suffix in SUFFIXES)
    nature = [path for path in files if path.parent.name == "nature"]
    scenes = [path for path in files if "sklearn" in path.parts]
    seen = [path for path in files if "mate" in path.parts and path.parent.name != "nature"]
    seen += [path for path in files if "skimage" in path.parts and path.stem in SKIMAGE]
    if not (nature and scenes and seen):
        raise InputError(f"{sources} lacks photographs of the packages; see benchmarks/lib/photos.py")
    return seen, nature + scenes


def _squares(files: Sequence[Path], out: Path, each: int) -> Path:
    out.mkdir(parents=True)
    chance, count = random.Random(0), 0
    for path in files:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        shortest = min(image.size)
        for _ in range(each if shortest >= SMALLEST else 0):
            side = chance.randint(SMALLEST, min(shortest, LARGEST))
            left, top = chance.randint(0, image.width - side), chance.randint(0, image.height - side)
            square = image.crop((left, top, left + side, top + side)).resize((SIZE, SIZE))
            square.save(out / f"{count:04d}.png")
            count += 1
    return out
