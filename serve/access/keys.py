"""Keys of clients: a TOML file of names, limits and SHA-256 of secrets; the secrets themselves are nowhere.

A secret has 256 random bits, so that a plain hash of it tells nothing: there is no dictionary to try.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from penjing.core.config import Config, dump_toml, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, holding

SCHEMA_VERSION = 1
PREFIX = "pj-"
SECRET_BYTES = 32
MAX_KEYS = 10_000
MAX_FILE_BYTES = 4 << 20
MAX_SECRET_LENGTH = 256  # of what a client shows: longer is no key, and is not hashed
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Key(Config):
    """One client. None of a limit is no limit."""

    name: str = Field(description="Of whoever holds it; metrics and logs say it.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="Of the secret.")
    created: str = Field(description="When it was made.")
    revoked: str | None = Field(default=None, description="Since when it is refused.")
    tokens_per_minute: int | None = Field(default=None, ge=1, description="Of prompts and answers together.")
    requests_per_minute: int | None = Field(default=None, ge=1, description="Requests that begin.")
    max_concurrent: int | None = Field(default=None, ge=1, description="Requests under way at once.")
    priority: int = Field(default=0, ge=-100, le=100, description="Lower ones come first in the queue.")
    metrics: bool = Field(default=False, description="It may read /metrics, which shows what all keys use.")

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("a name has 1 to 64 letters, digits, dots, dashes and underscores")
        return value


class KeyFile(Config):
    """All keys of a server."""

    schema_version: int = Field(default=SCHEMA_VERSION, le=SCHEMA_VERSION, description="Of the file's form.")
    key: tuple[Key, ...] = Field(default=(), max_length=MAX_KEYS, description="The keys.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> KeyFile:
        active = [key.name for key in self.key if key.revoked is None]
        if twice := sorted({name for name in active if active.count(name) > 1}):
            raise ValueError(f"the name {twice[0]!r} is there twice")
        return self


def read_keys(path: Path) -> KeyFile:
    """The keys in a file.

    Raises:
        InputError: it is missing, another user may read or change it, or it is not whole.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
                raise InputError(f"{path} is no file of keys; make one with 'penjing keys add NAME --file {path}'")
            if status.st_mode & 0o077:
                raise InputError(f"{path} can be read or changed by other users; run: chmod 600 {path}")
            values = tomllib.loads(file.read().decode("utf-8-sig"))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}; make it with 'penjing keys add NAME --file {path}'"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged or half-written: {error}; correct it, or put the old one back") from None
    try:
        return parse_config(KeyFile, values, str(path))
    except ConfigError as error:
        raise InputError(str(error)) from None


def add_key(path: Path, name: str, limits: dict[str, object]) -> str:
    """Add a key to a file, which is made if need be; the secret, which is known to nobody else.

    Raises:
        ConfigError: a wrong name or limit, or one that has a key already.
        InputError: the file cannot be used.
    """
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    values = {"name": name, "sha256": digest(secret), "created": _now(), **limits}
    key = parse_config(Key, values, f"key {name!r}")

    def added(keys: KeyFile) -> KeyFile:
        if any(other.name == name and other.revoked is None for other in keys.key):
            raise ConfigError(f"{name!r} has a key already; revoke it first, or choose another name")
        return KeyFile(key=(*keys.key, key))

    _change(path, added)
    return secret


def revoke_key(path: Path, name: str) -> None:
    """Refuse a key from now on; it stays in the file with the date.

    Raises:
        ConfigError: there is no such key.
        InputError: the file cannot be used.
    """

    def revoked(keys: KeyFile) -> KeyFile:
        if not any(key.name == name and key.revoked is None for key in keys.key):
            known = ", ".join(key.name for key in keys.key if key.revoked is None) or "none"
            raise ConfigError(f"there is no key {name!r} to revoke; there is {known}")
        return KeyFile(
            key=tuple(
                key.model_copy(update={"revoked": _now()}) if key.name == name and key.revoked is None else key
                for key in keys.key
            )
        )

    _change(path, revoked)


def digest(secret: str) -> str:
    """What the file holds of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """The keys of a file, read again when it has changed.

    Raises:
        InputError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] = ()
        self._keys: tuple[Key, ...] = ()
        self._refresh()

    def find(self, secret: str) -> Key | None:
        """The key of a secret, unless it is revoked; None if there is none.

        All are compared, in constant time, so that the time tells nothing.

        Raises:
            InputError: the file has changed and cannot be used: nobody is let in until it can.
        """
        self._refresh()
        shown = digest(secret) if len(secret) <= MAX_SECRET_LENGTH else ""
        found = None
        for key in self._keys:
            if hmac.compare_digest(shown, key.sha256):
                found = key
        return found

    def names(self) -> list[str]:
        """Of the keys that count."""
        return [key.name for key in self._keys]

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
        except OSError:
            stamp = ()
        if not stamp or stamp != self._stamp:
            self._stamp = ()
            self._keys = tuple(key for key in read_keys(self._path).key if key.revoked is None)
            self._stamp = stamp


def _change(path: Path, change: Callable[[KeyFile], KeyFile]) -> None:
    with holding(path.with_name(f".{path.name}.lock"), 0o600):  # two commands at once must not lose a key
        keys = read_keys(path) if path.exists() else KeyFile()
        changed = change(keys)
        atomic_write_text(path, dump_toml(changed.model_dump(mode="json", exclude_none=True)), 0o600)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
