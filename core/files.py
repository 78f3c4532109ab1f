"""Atomic files and folders: a result appears under its final name when it is complete, or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penjing.core.errors import InputError, SetupError
from penjing.core.progress import volume

_NEXT_STEP = {
    errno.ENOSPC: "the disk is full; free some space and run again",
    errno.EDQUOT: "the disk quota is used up; free some space and run again",
    errno.EFBIG: "the file-size limit is reached; raise it (ulimit -f) and run again",
    errno.EACCES: "permission is denied; choose a folder you may write to",
    errno.EPERM: "permission is denied; choose a folder you may write to",
    errno.EROFS: "the file system is read-only; choose a folder you may write to",
    errno.ENOENT: "no folder can be made there; choose another",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "a link there leads back to itself; choose another folder",
}
_RENAME_EXCHANGE = 2  # renameat2(2)
_AT_FDCWD = -100


class NoRoomError(OSError):
    """A file needs more bytes than its disk has free."""

    def __init__(self, path: Path, needed: int, free: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.needed, self.free = needed, free


def check_room(path: Path, needed: int) -> None:
    """Refuse to begin the file `path`, of `needed` bytes, where they are not free; its folder exists.

    Raises:
        NoRoomError: `writing` makes a `SetupError` of it that says both numbers.
    """
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise NoRoomError(path, needed, free)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` (full disk, permission …) into a `SetupError`."""
    try:
        yield
    except OSError as error:
        missing = error.errno == errno.ENOENT  # a file that is read may be missing too: that is another matter
        if error.errno not in _NEXT_STEP or (missing and not _leads_to(str(error.filename), path.absolute())):
            raise
        reason = _NEXT_STEP[error.errno]
        if isinstance(error, NoRoomError):
            room = f"{volume(error.needed)} are needed and {volume(error.free)} are free"
            reason = f"the disk is full, {room}; free some space and run again"
        raise SetupError(f"cannot write {path}: {reason}") from error


def _leads_to(name: str, path: Path) -> bool:
    """Whether `name` is on the way to `path`, or is what is written beside it until that is complete."""
    partial = str(path.with_name(f".{path.name}.partial-"))
    return path.is_relative_to(name) or str(Path(name).absolute()).startswith(partial)


@contextmanager
def publish_folder(final: Path, *, replace: bool = False, marker: str = "penjing.json") -> Iterator[Path]:
    """Yield a temporary sibling of `final` to fill; rename it to `final` when the block ends well, else remove it.

    Every file is flushed to disk before the rename, and siblings left by killed processes are removed at the start.

    Args:
        final: folder to appear; it must not exist (an empty folder counts as absent) unless `replace`. Links to it are
            followed.
        replace: swap an existing `final` for the new one and delete the old one after.
        marker: a file that the existing folder must hold to be replaced, so that a mistyped path costs no data.

    Raises:
        InputError: `final` exists and may not be replaced, or its path leads through a file.
        SetupError: disk full, no permission.
    """
    check_replaceable(final, replace, marker)
    final = _followed(final)
    with writing(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(final)
        partial, lock = _make_partial(final)
    try:
        with writing(final):
            yield partial
            sync_tree(partial)
            _move_into_place(partial, final, replace, marker)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def atomic_write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write `data` to `path` so that a reader sees the old content or all of the new.

    Args:
        mode: permissions, less those that the umask takes. A secret has 0o600: the umask itself belongs to all threads.

    Raises:
        InputError: `path` is a folder, or leads through a file.
        SetupError: disk full, no permission.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    with writing(path):
        check_writable(path)
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the name of the file to write")
        try:
            _followed(path.parent).mkdir(parents=True, exist_ok=True)
            with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _sync(path.parent)
        except FileNotFoundError as error:  # of a name that says nothing to whoever gave the other
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
        finally:
            partial.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """`atomic_write_bytes` of `text` as UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"), mode)


@contextmanager
def holding(lock: Path, mode: int = 0o666) -> Iterator[None]:
    """Hold the file `lock`, which is made: of several processes one works, the others wait. The kernel lets it go when
    the process ends, whatever ends it.

    Raises:
        SetupError: disk full, no permission.
    """
    with writing(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(lock, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content, read in pieces.

    Raises:
        InputError: the file is missing or unreadable.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def check_replaceable(final: Path, replace: bool, marker: str) -> None:
    """Refuse what `publish_folder` will refuse, before there is anything to publish.

    Raises:
        InputError: `final` exists and may not be replaced, or its path leads through a file.
        SetupError: nothing may be written there.
    """
    with writing(final):
        final = _followed(final)
        check_writable(final)
        if final.exists() and not final.is_dir():
            raise InputError(f"{final} is a file; choose another output folder")
        if not final.exists() or not any(final.iterdir()):
            return
        if not replace:
            raise InputError(f"{final} already exists; replace it with --force, or choose another output folder")
        if not (final / marker).exists():
            raise InputError(
                f"{final} holds no {marker}, so it is not replaced; delete it yourself or choose another output"
            )


def check_writable(path: Path) -> None:
    """Refuse `path` where the nearest folder that exists takes nothing, before there is anything to write.

    Raises:
        InputError: its path leads through a file.
        SetupError: no permission, a disk that is read-only, or links in a circle.
    """
    with writing(path):
        folder = _followed(path.parent)
        near = next(each for each in (folder, *folder.parents) if each.exists())
        if not near.is_dir():
            raise InputError(f"{near} is a file, so {path} cannot lie in it; choose another place")
        if not os.access(near, os.W_OK | os.X_OK):
            read_only = os.statvfs(near).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "nothing can be made", str(near))


def _followed(path: Path) -> Path:
    """Where `path` lies, behind all links of its path; raises OSError where they lead back to themselves."""
    found = Path(os.path.realpath(path))
    if any(each.is_symlink() for each in (found, *found.parents)):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def _make_partial(final: Path) -> tuple[Path, int]:
    # The lock is on the folder itself: the kernel drops it when the process dies, whatever kills it.
    while True:
        partial = final.with_name(f".{final.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.exists():  # else another process took it for stale between mkdir and flock
            return partial, lock
        os.close(lock)


def _remove_stale(final: Path) -> None:
    for sibling in final.parent.glob(f".{_glob_escape(final.name)}.partial-*"):
        try:
            lock = os.open(sibling, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(sibling, ignore_errors=True)
        except BlockingIOError:
            continue  # its writer lives
        finally:
            os.close(lock)


def _glob_escape(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _move_into_place(partial: Path, final: Path, replace: bool, marker: str) -> None:
    check_replaceable(final, replace, marker)  # again: another process may have finished first
    if final.exists() and any(final.iterdir()):
        _exchange(partial, final)
    else:
        os.rename(partial, final)
    _sync(final.parent)


def _exchange(partial: Path, final: Path) -> None:
    """Swap two folders in one atomic step; where the file system cannot, in two renames."""
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = os.fsencode(partial), os.fsencode(final)
    if libc.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(final))
    old = final.with_name(f"{partial.name}-old")
    os.rename(final, old)
    os.rename(partial, final)
    os.rename(old, partial)  # the caller removes what is left under the partial name


def sync_tree(folder: Path) -> None:
    """Flush every file of `folder` to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
