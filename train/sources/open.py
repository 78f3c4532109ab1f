"""Which kind of source a setting names."""

from __future__ import annotations

import hashlib
from pathlib import Path

from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.train.data.emoji import BUILTIN, emoji_pairs
from penjing.train.sources.folder import SUFFIXES, image_folder
from penjing.train.sources.packed import TARS, is_tar
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Source, join
from penjing.train.sources.tables import read_table
from penjing.train.sources.tar import read_tar
from penjing.train.sources.tensors import call_function, read_arrays

TABLES = (".parquet", ".arrow", ".jsonl", ".ndjson")
ARRAYS = (".npz", ".npy", ".safetensors")


def open_source(settings: SourceSettings) -> Source:
    """The samples that `settings.source` names.

    Raises:
        InputError: it does not exist, is of no known kind, damaged or empty; see each kind.
        SetupError: a package is needed that is not installed.
    """
    text = settings.source
    assert text is not None
    if ".py:" in text:
        return call_function(text, settings.labels)
    path = Path(built_in(text))
    try:
        there, is_folder = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(f"{text[:200]!r} cannot be a path of samples ({error!s:.200})") from None
    if is_folder:
        files = sorted(
            found for found in path.rglob("*") if found.is_file() and (found.suffix.lower() in TABLES or is_tar(found))
        )
        if not files or any(found.suffix.lower() in SUFFIXES for found in path.rglob("*")):
            return image_folder(path, settings.labels)
        names = [str(found.relative_to(path)) for found in files]
        return join([_file(found, settings) for found in files], text, names)
    if not there:
        raise InputError(f"{text} does not exist; name a folder or file with samples")
    return _file(path, settings)


def built_in(text: str) -> str:
    """The path of what comes from a package, such as builtin:emoji-google, fetched on the first call; `text` else.

    Raises:
        InputError, SetupError: see `emoji_pairs`.
    """
    return str(emoji_pairs(text.removeprefix(BUILTIN), Silent())) if text.startswith(BUILTIN) else text


def fingerprint(settings: SourceSettings) -> dict[str, str]:
    """What tells a source from what it was before: its name → SHA-256 of its samples (their beginnings) and classes.

    Raises:
        InputError, SetupError: as `open_source`.
    """
    source = open_source(settings)
    found = hashlib.sha256(repr(source.labels).encode())
    for index in range(source.size):
        found.update(source.digest(index).to_bytes(8, "little"))
    return {source.where: found.hexdigest()}


def _file(path: Path, settings: SourceSettings) -> Source:
    suffix = path.suffix.lower()
    if suffix in TABLES:
        return read_table(path, settings)
    if is_tar(path):
        return read_tar(path, settings.labels)
    if suffix in ARRAYS:
        return read_arrays(path, settings.labels)
    kinds = ", ".join((*TABLES, *TARS, *ARRAYS))
    raise InputError(f"{path} is no folder and no {kinds} file; give one of these or FILE.py:FUNCTION")
