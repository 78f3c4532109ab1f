"""Remote files by their addresses (s3://, gs://, https://, memory:// and whatever else fsspec has a library for)."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, TypeVar

from penjing.core.errors import InputError, PenjingError, SetupError, first_line
from penjing.core.remote import late

T = TypeVar("T")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_VERSION = (
    "ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "created", "generation", "md5Hash",
)  # fmt: skip
_TRIES, _FIRST_WAIT_S = 6, 0.5  # waits of 0.5, 1, 2, 4 … s: a connection that is gone for 15 s costs nothing else
_CONNECT_S, _READ_S = 10, 30  # of a connection over http, until its first and its next bytes
SMALL = 64 << 20  # bytes of a file that is read at once
_REFUSED = (401, 403, 407)
_ASKED_AGAIN_S = 5.0  # so often a file is asked whether it is still the same while it is read


def is_remote(address: str) -> bool:
    """Whether `address` is one of a remote file, such as s3://bucket/a.jsonl, and no path."""
    return _ADDRESS.match(address) is not None


@dataclass(frozen=True)
class RemoteFile:
    """A file elsewhere.

    Attributes:
        address: such as "s3://bucket/corpus/a.jsonl.gz".
        size: in bytes.
        version: what its store says by which a changed file is told from the old one: its ETag, or when it was
            written; "" where the store says nothing of the kind, and a change is noticed by the size alone.
    """

    address: str
    size: int
    version: str

    @property
    def key(self) -> str:
        """Names this version of the file in the cache."""
        return hashlib.sha256(f"{self.address}\0{self.size}\0{self.version}".encode()).hexdigest()[:24]

    @property
    def name(self) -> str:
        """The last part of its address."""
        return _path(self.address).name

    @property
    def suffix(self) -> str:
        """As of `Path`: ".gz" of "a.jsonl.gz"."""
        return _path(self.address).suffix

    @property
    def stem(self) -> str:
        """As of `Path`: "a.jsonl" of "a.jsonl.gz"."""
        return _path(self.address).stem

    def __str__(self) -> str:
        return self.address

    def fetch(self, begin: int, end: int) -> bytes:
        """Bytes begin … end - 1, from the store; asked for again while the connection fails.

        Raises:
            InputError: the file is gone, is not the same any more, or its store sends no parts of files.
            SetupError: the store does not answer, or does not let us in.
        """
        self._check()
        store = store_of(self.address)
        data = _asked(self.address, lambda: store.cat_file(_inside(store, self.address), start=begin, end=end))
        if begin == 0 and len(data) == self.size:
            data = data[:end]  # all of it, where the server knows no parts
        if len(data) != end - begin:
            self._check(now=True)
            reason = "sends whole files where a part is asked for" if len(data) == self.size else "sent too little"
            raise InputError(f"{self.address}: its server {reason}; copy the file to a disk, and name it there")
        return data

    def _check(self, *, now: bool = False) -> None:
        with _checks_lock:
            if not now and time.monotonic() - _checked_at.get(self, -_ASKED_AGAIN_S) < _ASKED_AGAIN_S:
                return
            _checked_at[self] = time.monotonic()
        if (found := remote_file(self.address)) != self:
            raise InputError(
                f"{self.address} was changed while it was read ({self.size:,} bytes, now {found.size:,}); run again "
                "when it stays as it is"
            )


_checks_lock = threading.Lock()
_checked_at: dict[RemoteFile, float] = {}


def remote_file(address: str) -> RemoteFile:
    """The file at `address`, as it is now.

    Raises:
        InputError: there is none, or its store does not say how large it is.
        SetupError: the store does not answer, does not let us in, or needs a package.
    """
    store = store_of(address)

    def ask() -> dict[str, Any]:
        store.invalidate_cache()  # some stores answer from what they listed before
        return store.info(_inside(store, address))

    return _described(address, _asked(address, ask))


def remote_files(address: str) -> list[RemoteFile]:
    """The file at `address`, or those of the folder there in the order of their names; none of them hidden.

    Raises:
        InputError, SetupError: as `remote_file`; or there is nothing.
    """
    store = store_of(address)
    root = _inside(store, address)
    if not address.endswith("/"):
        info = _asked(address, lambda: store.info(root))
        if info.get("type") != "directory":
            return [_described(address, info)]
    found: dict[str, Any] = _asked(address, lambda: store.find(root, detail=True))
    files = []
    for path, info in sorted(found.items()):
        below = path.removeprefix(root.rstrip("/"))  # of names such as a//b both strokes count
        if not below.strip("/") or any(part.startswith(".") for part in below.split("/")):
            continue
        if "?" in below and address.startswith("http"):
            continue  # pages that list a folder link to themselves in other orders
        if below.endswith("/") and not info.get("size"):
            continue  # stores of objects mark folders so
        full = address.rstrip("/") + below
        # lists of folders over http have neither sizes nor versions
        files.append(remote_file(full) if info.get("size") is None else _described(full, info))
    if not files:
        raise InputError(f"{address} holds no files; check the address")
    return files


def read_remote(address: str) -> bytes:
    """All of a small file.

    Raises:
        InputError: as `remote_file`; or it has more than `SMALL` bytes.
    """
    file = remote_file(address)
    if file.size > SMALL:
        raise InputError(f"{address} has {file.size:,} bytes, where {SMALL:,} are the most that such a file may have")
    return file.fetch(0, file.size) if file.size else b""


@lru_cache(maxsize=64)
def _store(protocol: str) -> Any:
    try:
        fsspec = import_module("fsspec")
        options: dict[str, dict[str, Any]] = {}
        if protocol in ("http", "https"):
            limits = import_module("aiohttp").ClientTimeout(sock_connect=_CONNECT_S, sock_read=_READ_S)
            # Servers that compress what they send know no parts of it.
            options["client_kwargs"] = {"timeout": limits, "headers": {"Accept-Encoding": "identity"}}
        elif protocol in ("s3", "s3a"):  # which else asks five times itself, each of our times
            retries = {"total_max_attempts": 1}
            options["config_kwargs"] = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": retries}
        given = fsspec.config.conf.get(protocol, {})  # what the user says goes first
        store = fsspec.filesystem(protocol, **{key: ours | given.get(key, {}) for key, ours in options.items()})
        if protocol in ("s3", "s3a"):
            store.retries = 1  # of s3fs, beside those of its library
        return store
    except ImportError as error:
        raise SetupError(
            f"{protocol}:// needs a package that is not installed ({error}): pip install 'penjing[remote]', or the one "
            "that fsspec has for it"
        ) from None
    except ValueError as error:
        raise InputError(f"{protocol}:// is no kind of address that is read ({error}); try https:// or s3://") from None


def store_of(address: str) -> Any:
    """The fsspec file system of `address`; its settings and keys are those that fsspec and the store's own library take
    from their files and the environment."""
    return _store(address.partition("://")[0])


def _inside(store: Any, address: str) -> str:
    return str(store._strip_protocol(address))


def _path(address: str) -> PurePosixPath:
    rest = address.partition("://")[2]
    return PurePosixPath(rest.partition("?")[0] if address.startswith("http") else rest)


def _described(address: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("type") == "directory":
        raise InputError(f"{address} is a folder, and a file is needed")
    if info.get("size") is None:
        raise InputError(f"{address}: its server does not say how large it is; copy it to a disk, and name it there")
    said = next((f"{key}={_plain(info[key])}" for key in _VERSION if info.get(key)), "")
    return RemoteFile(address, int(info["size"]), said)


def _plain(value: object) -> object:
    return value.timestamp() if isinstance(value, datetime) else value  # lists and files say times in two ways


def _asked(address: str, ask: Callable[[], T]) -> T:
    """What `ask` gives; asked again, with growing pauses, while the connection fails."""
    where = "/".join(address.split("/")[:3])
    text = f"{where} has not answered for {late.LATE_S:g} s; it is waited for, and asked up to {_TRIES} times"
    with late.told_if_late(text):
        return _asked_again(address, ask)


def _asked_again(address: str, ask: Callable[[], T]) -> T:
    wait = _FIRST_WAIT_S
    for last in (*[False] * (_TRIES - 1), True):
        try:
            return ask()
        except PenjingError:
            raise
        except Exception as error:  # each library of a store has its own
            final = _told(address, error)
            if final is not None:
                raise final from error
            if last:
                raise SetupError(
                    f"{address} cannot be read: {first_line(error)}, after {_TRIES} tries; check the network, then run "
                    "again: what was read is kept"
                ) from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError("the last try returns or raises")


def _told(address: str, error: Exception) -> PenjingError | None:
    """What to tell of an error that another try would not mend; None of one that it may."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    status = next((each for each in (getattr(cause, "status", None) for cause in chain) if isinstance(each, int)), None)
    names = {type(each).__name__ for each in chain}
    if status in _REFUSED or any(isinstance(each, PermissionError) for each in chain) or "NoCredentialsError" in names:
        said = f"status {status}" if status else first_line(error).rstrip(".")
        return SetupError(
            f"{address}: its store does not let us in ({said}); give it keys as its library takes them, for example in "
            'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or as JSON in FSSPEC_HTTPS: {"headers": {"Authorization": …}}'
        )
    if status is not None and (status >= 500 or status in (408, 429)):
        return None
    if any(isinstance(each, TimeoutError | ConnectionError) for each in chain) or names & {
        "ClientConnectorError", "ServerDisconnectedError", "ClientPayloadError", "ClientOSError", "FSTimeoutError",
        "EndpointConnectionError",
    }:  # fmt: skip
        return None
    if status == 404 or any(isinstance(each, FileNotFoundError | NotADirectoryError) for each in chain):
        return InputError(f"{address} does not exist; check the address")
    if status is not None:
        return InputError(f"{address}: its server answers with status {status}; check the address")
    if isinstance(error, OSError):
        return None
    return InputError(f"{address} cannot be read: {type(error).__name__}: {error}")
