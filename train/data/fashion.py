"""Fashion-MNIST (Xiao et al., https://arxiv.org/abs/1708.07747): 60 000 + 10 000 grey images of 28 × 28, ten
classes."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import holding, publish_folder
from penjing.core.progress import Progress, Silent
from penjing.train.data.images import ImageSet

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_PACKAGE = "dataset-fashion-mnist"
_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
# SHA-256 of the unpacked files: the same whoever packed them.
_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def load_fashion(split: str, progress: Progress | None = None) -> ImageSet:
    """The "train" or "test" images; fetched into the cache on the first call (31 MB).

    Raises:
        SetupError: neither Debian's package nor the public URL can be reached.
        InputError: what came, or lies in the cache, is not the data set.
    """
    folder = cache_dir() / "fashion-mnist"
    with holding(folder.with_suffix(".lock")):
        if not folder.exists():
            _fetch(folder, progress or Silent())
    prefix = {"train": "train", "test": "t10k"}[split]
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte")
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte")
    return ImageSet(images[:, None], labels, len(CLASSES))


def read_idx(path: Path) -> np.ndarray:
    """Read a file of unsigned bytes in LeCun's IDX format.

    Raises:
        InputError: missing, of another type, or of another size than its header says.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; delete {path.parent} to fetch it again") from error
    rank = data[3] if len(data) > 3 else 0
    shape = tuple(int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(rank))
    if data[:3] != b"\x00\x00\x08" or rank == 0 or len(data) != 4 + 4 * rank + int(np.prod(shape)):
        raise InputError(f"{path} is no complete IDX file of bytes; delete {path.parent} to fetch it again")
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def _fetch(folder: Path, progress: Progress) -> None:
    progress.start("fetching Fashion-MNIST", 1)
    with publish_folder(folder) as partial:
        if shutil.which("apt-get") is None or not _fetch_package(partial):
            _fetch_url(partial)
        for name, expected in _FILES.items():
            actual = hashlib.sha256((partial / name).read_bytes()).hexdigest()
            if actual != expected:
                raise InputError(f"Fashion-MNIST's {name} has SHA-256 {actual[:12]}…, not {expected[:12]}…; try again")
    progress.advance()


def _fetch_package(folder: Path) -> bool:
    """Debian's package, unpacked without installing it (no root); False where apt has none."""
    with tempfile.TemporaryDirectory() as scratch:
        fetched = subprocess.run(
            ["apt-get", "download", _PACKAGE], cwd=scratch, capture_output=True, timeout=600, check=False
        )
        packages = list(Path(scratch).glob("*.deb"))
        if fetched.returncode or not packages:
            return False
        subprocess.run(
            ["dpkg", "-x", packages[0].name, "unpacked"], cwd=scratch, capture_output=True, timeout=600, check=True
        )
        for name in _FILES:
            _unpack(Path(scratch) / "unpacked/usr/share/datasets/fashion-mnist" / f"{name}.gz", folder / name)
    return True


def _fetch_url(folder: Path) -> None:
    for name in _FILES:
        packed = folder / f"{name}.gz"
        try:
            with urllib.request.urlopen(f"{_URL}/{name}.gz", timeout=60) as answer, open(packed, "wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise SetupError(
                f"cannot fetch Fashion-MNIST from apt ({_PACKAGE}) or {_URL} ({error}); "
                "check the network, or 'apt-get update'"
            ) from error
        _unpack(packed, folder / name)
        packed.unlink()


def _unpack(packed: Path, target: Path) -> None:
    with gzip.open(packed, "rb") as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)
