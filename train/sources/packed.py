"""Tars that are compressed as a whole: unpacked once into the cache, because samples are read in any order."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import tempfile
import zlib
from pathlib import Path
from typing import IO

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError
from penjing.core.files import NoRoomError, check_room, writing
from penjing.core.progress import megabytes
from penjing.core.text.records import open_bytes

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
TARS = (".tar", *PACKED)
TIMES = 50  # as large as it is packed: images hardly shrink, bitmaps of one colour do
LEAST = 1 << 30  # bytes that are always unpacked
_PIECE = 1 << 20
_ROOM = 1 << 28  # bytes of the disk that stay free


def is_tar(path: Path) -> bool:
    """Whether its name is that of a tar, compressed or not."""
    return path.name.lower().endswith(TARS)


def unpacked(path: Path) -> Path:
    """`path`, or what it holds where it is compressed: a file of the cache, made unless it is there already.

    Raises:
        InputError: damaged, cut off, or more than `TIMES` times (and `LEAST`) as large as it is packed.
        SetupError: the disk is full, or zstandard is needed and not installed.
    """
    if not path.name.lower().endswith(PACKED):
        return path
    found = path.stat()
    said = f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
    folder = cache_dir() / "tars"
    made = folder / f"{hashlib.blake2b(said.encode(), digest_size=16).hexdigest()}.tar"
    if made.is_file():
        return made
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    most = max(LEAST, TIMES * found.st_size)
    with writing(made):
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=made.stem, suffix=".partial")
        try:
            with os.fdopen(descriptor, "wb") as out, _opened(path) as packed:
                _copy(path, packed, out, made, most)
            os.replace(name, made)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise _damaged(path, error) from error
        except OSError as error:
            if isinstance(error, NoRoomError) or error.errno is not None:
                raise
            raise _damaged(path, error) from error  # of bz2 and zstandard, which have no error of their own
        finally:
            Path(name).unlink(missing_ok=True)
    return made


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == ".tgz" else open_bytes(path)  # type: ignore[return-value]


def _copy(path: Path, packed: IO[bytes], out: IO[bytes], made: Path, most: int) -> None:
    size = 0
    while piece := packed.read(_PIECE):
        size += len(piece)
        if size > most:
            raise InputError(
                f"{path} unpacks to more than {megabytes(most)}, {TIMES} times what it takes: no images do that; "
                "unpack it yourself if it is what you want"
            )
        check_room(made, len(piece) + _ROOM)
        out.write(piece)


def _damaged(path: Path, error: BaseException) -> InputError:
    return InputError(f"{path} is no whole, compressed tar ({error}); get it again")
