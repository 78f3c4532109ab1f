"""Blocks of remote files: read ahead by threads, kept on the disk, and checked by their SHA-256 when they are read
from there."""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from penjing.core.cache import cache_dir
from penjing.core.errors import ConfigError
from penjing.core.files import holding, writing
from penjing.core.remote.files import RemoteFile

BLOCK = 2 << 20  # bytes: with eight at once and 50 ms until the first byte, 300 MB/s
AHEAD = 8  # blocks that are fetched before a reader in order asks for them
_THREADS = 8
_OPEN = 256  # blocks of a file that stay mapped
_LOCKS = 64  # files that keep processes from fetching the same block; two blocks seldom share one
_LIMIT_GB = 20.0
_FREED = 0.9  # of the limit is left after old blocks were removed
_pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote")


def cache_limit() -> int:
    """Bytes that blocks may take on the disk: $PENJING_REMOTE_GB, else 20 GB.

    Raises:
        ConfigError: that is no number above 0.
    """
    said = os.environ.get("PENJING_REMOTE_GB", str(_LIMIT_GB))
    try:
        limit = float(said)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise ConfigError(f"PENJING_REMOTE_GB is {said!r}; set it to gigabytes, such as 20, or leave it out")
    return int(limit * 1e9)


class Blocks:
    """The bytes of a remote file by block; for several threads, and beside other processes.

    Args:
        block: bytes of a block; all that read a file must take the same.
    """

    def __init__(self, file: RemoteFile, block: int = BLOCK) -> None:
        self.file, self.block = file, block
        self._folder = cache_dir() / "remote" / f"{file.key}-{block}"
        self._maps: OrderedDict[int, Any] = OrderedDict()
        self._coming: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-self.file.size // self.block)

    def read(self, begin: int, end: int) -> bytes:
        """Bytes begin … end - 1 of the file.

        Raises:
            PenjingError: see `RemoteFile.fetch`; or the disk is full.
        """
        parts = []
        for number in range(begin // self.block, -(-end // self.block)):
            start = number * self.block
            parts.append(self._get(number)[max(0, begin - start) : end - start])
        return b"".join(parts)

    def expect(self, numbers: Iterable[int]) -> None:
        """Have `numbers` read, which will be asked for."""
        for number in numbers:
            if 0 <= number < self.count:
                with self._lock:
                    if number not in self._maps and number not in self._coming:
                        self._coming[number] = _pool.submit(self._load, number)

    def _get(self, number: int) -> Any:
        with self._lock:
            if number in self._maps:
                self._maps.move_to_end(number)
                return self._maps[number]
            future = self._coming.get(number)
            if future is None:
                future = self._coming[number] = _pool.submit(self._load, number)
        try:
            data = future.result()
        finally:
            with self._lock:
                self._coming.pop(number, None)
        with self._lock:
            self._maps[number] = data
            while len(self._maps) > _OPEN:
                self._maps.popitem(last=False)
        return data

    def _load(self, number: int) -> Any:
        """The bytes of a block: mapped from the disk, fetched first where they are not there or not what they were."""
        begin = number * self.block
        size = min(self.block, self.file.size - begin)
        with holding(self._folder / f"lock-{number % _LOCKS:02d}"):
            for path in self._folder.glob(f"{number:08d}-*"):
                data = _mapped(path, size)
                if data is not None and hashlib.sha256(data).hexdigest() == path.name.partition("-")[2]:
                    os.utime(path)  # what was used last is removed last
                    return data
                path.unlink(missing_ok=True)
            fetched = self.file.fetch(begin, begin + size)
            path = self._folder / f"{number:08d}-{hashlib.sha256(fetched).hexdigest()}"
            _make_room(len(fetched))
            with writing(path):
                partial = path.with_name(f"part-{number:08d}")
                partial.write_bytes(fetched)
                partial.rename(path)
            return _mapped(path, size) or fetched


def open_remote(file: RemoteFile) -> IO[bytes]:
    """The bytes of `file` in order, or from any place; up to `AHEAD` blocks are read before they are asked for."""
    return io.BufferedReader(BlockReader(file, AHEAD), 1 << 18)


class BlockReader(io.RawIOBase):
    """A remote file as Python's other files are: read in order or from any place."""

    def __init__(self, file: RemoteFile, ahead: int, block: int = BLOCK) -> None:
        self._blocks, self._ahead, self._at = Blocks(file, block), ahead, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blocks.file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        size = max(0, min(len(buffer), self._blocks.file.size - self._at))
        if size:
            number = self._at // self._blocks.block
            self._blocks.expect(range(number, number + 1 + self._ahead))
            buffer[:size] = self._blocks.read(self._at, self._at + size)
        self._at += size
        return size


def _mapped(path: Path, size: int) -> Any:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if os.fstat(file.fileno()).st_size == size else None
    except OSError:  # removed meanwhile by a process that made room
        return None


_room_lock = threading.Lock()
_used: dict[Path, float] = {}  # bytes of blocks on the disk, counted once and added to


def _make_room(size: int) -> None:
    """Remove the blocks that were not used for longest, where the limit would be passed."""
    root, limit = cache_dir() / "remote", cache_limit()
    with _room_lock:
        if root not in _used:
            _used[root] = sum(stat.st_size for _, stat in _stored(root))
        _used[root] += size
        if _used[root] <= limit:
            return
        found = sorted(_stored(root), key=lambda each: each[1].st_mtime)
        total = size + sum(stat.st_size for _, stat in found)
        for path, stat in found:
            if total <= _FREED * limit:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size
        _used[root] = total


def _stored(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in root.glob("*-*/????????-*"):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()
