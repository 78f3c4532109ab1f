"""`penjing.json`: what a checkpoint or artifact folder is, how it was made, and the SHA-256 of each of its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, sha256_file

MANIFEST_NAME = "penjing.json"
SCHEMA_VERSION = 1
Kind = Literal["checkpoint", "artifact", "adapter", "corpus"]
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Manifest(Config):
    """Content of `penjing.json`; `sha256` maps each file's name inside the folder to its hexadecimal digest."""

    schema_version: Literal[1] = Field(default=SCHEMA_VERSION, description="Version of this format.")
    kind: Kind = Field(description="What the folder holds.")
    created_by: dict[str, Any] = Field(description="How it was made.")
    sha256: dict[str, str] = Field(min_length=1, description="Hash of each file by name.")
    extra: dict[str, Any] = Field(default_factory=dict, description="What else its maker states.")

    def listed(self, name: str) -> list[str]:
        """The texts that `extra` has under `name`; none where it has nothing.

        Raises:
            InputError: it has something else there.
        """
        found = self.extra.get(name, [])
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            said = f"{name} must be a list of texts (got {found!r:.60})"
            raise InputError(f"{MANIFEST_NAME}: {said}; make the folder again")
        return found


def write_manifest(
    folder: Path, kind: Kind, created_by: dict[str, Any], extra: dict[str, Any] | None = None
) -> Manifest:
    """Hash every file of `folder` and write its `penjing.json`; call it last.

    Args:
        folder: a complete folder, not yet published.
        kind: "checkpoint", "artifact", "adapter" or "corpus".
        created_by: command, source, license, versions: whatever says how to make it again.
        extra: further facts of the stage that wrote it.
    """
    names = sorted(
        os.path.relpath(os.path.join(root, name), folder) for root, _, files in os.walk(folder) for name in files
    )
    hashes = {name: sha256_file(folder / name) for name in names if name != MANIFEST_NAME}
    manifest = Manifest(kind=kind, created_by=created_by, sha256=hashes, extra=extra or {})
    atomic_write_text(folder / MANIFEST_NAME, json.dumps(manifest.model_dump(), indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read `folder`/penjing.json; the hashes are not checked here (see `verify`).

    Raises:
        InputError: missing, malformed, or written by a newer schema.
    """
    path = folder / MANIFEST_NAME
    values = read_json_object(path)
    version = values.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise InputError(f"{path} has schema_version {version}, this penjing reads {SCHEMA_VERSION}; upgrade penjing")
    try:
        manifest = parse_config(Manifest, values, str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: make the folder again") from None
    for name in manifest.sha256:
        check_inside(path, name)
    return manifest


def verify(folder: Path) -> Manifest:
    """Check every hash of the manifest, and that no weight file is missing from it.

    Raises:
        InputError: names the first file that is missing, changed, or not listed.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.sha256.items():
        if not (folder / name).is_file():
            raise InputError(f"{folder / name} is missing though {MANIFEST_NAME} lists it; make the folder again")
        actual = sha256_file(folder / name)
        if actual != expected:
            raise InputError(
                f"{folder / name} has SHA-256 {actual[:12]}…, {MANIFEST_NAME} says {expected[:12]}…: "
                "it was changed or damaged; make the folder again"
            )
    for weights in sorted(folder.glob("*.safetensors")):
        if weights.name not in manifest.sha256:
            raise InputError(f"{weights} is not listed in {MANIFEST_NAME}; remove it or make the folder again")
    return manifest


def was_made_by(folder: Path, created_by: Mapping[str, Any]) -> bool:
    """Whether `folder` is complete and its manifest says all of `created_by`; of what is None there, it says nothing.

    Raises:
        InputError: it says so, and a file is missing, changed, or not listed.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return False
    made = read_manifest(folder).created_by
    if any(made.get(key) != value for key, value in created_by.items()):
        return False
    verify(folder)
    return True


def identity(folder: Path) -> dict[str, str]:
    """What tells one checkpoint from another: the hashes in its manifest, or of its files where it has none.

    Raises:
        InputError: there is no checkpoint.
    """
    read_json_object(folder / "config.json")
    if (folder / MANIFEST_NAME).is_file():
        return read_manifest(folder).sha256
    return {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def check_inside(path: Path, name: str) -> None:
    """Refuse a file name, read from `path`, that would lead out of its folder.

    Raises:
        InputError: absolute, or with a `..` part, or empty.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise InputError(f"{path} names the file {name!r}, which is outside its folder; refused")


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file whose top level is an object.

    Raises:
        InputError: missing, unreadable, not UTF-8, not JSON, text with half a surrogate pair, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a byte order mark
        values = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode("utf-8")  # half a pair is no character: ValueError
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; {_hint(path)}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); the file is damaged: get or make it again") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds a JSON {type(values).__name__}, not an object; get or make it again")
    return values


def _hint(path: Path) -> str:
    if not path.parent.exists():
        return f"there is no folder {path.parent}"
    return "is this a model folder? 'penjing import' makes one"
