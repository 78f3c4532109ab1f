"""What lies in the files that settings name: a result is told by it from one that was made of other files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.own import OWN, WRITER
from penjing.compress.samples.text import CALIBRATE
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES, family_of
from penjing.core.files import sha256_file
from penjing.core.manifest import identity
from penjing.core.progress import Silent
from penjing.core.text.documents import text_files
from penjing.train.chat.rows import Row, take_rows
from penjing.train.data.corpora import source_files
from penjing.train.sources.folder import SUFFIXES
from penjing.train.sources.open import fingerprint
from penjing.train.sources.scenes import SCENES
from penjing.train.sources.source import content_digest

_BUILTIN = "builtin:"  # comes with a package, or is written by a model
_HEAD = 1 << 16  # bytes of a picture that are compared, as of a folder of images


def calibration_files(data: DataSettings) -> dict[str, dict[str, str]]:
    """SHA-256 of what `[data]` names by path: of texts, rows and samples ("data.calibrate"), and of what writes text in
    the model's place ("data.own_texts.writer").

    Raises:
        ConfigError: the writer is no decoder.
        InputError: a file is missing or cannot be read.
        SetupError: a package is missing that reads one.
    """
    texts = [file for path in data.calibrate if str(path) != OWN for file in text_files(path, CALIBRATE)]
    found = {str(file): sha256_file(file) for file in texts}
    found |= row_files(data.rows, data.row_images, "data.rows")
    if data.source is not None:
        found |= fingerprint(data)
    named = {CALIBRATE: found} if found else {}
    if (writer := data.own_texts.writer) is not None:
        if (kind := family_of(writer)) != "decoder":
            raise ConfigError(f"{WRITER}={writer} is {FAMILIES.get(kind, kind)}, which writes no text; name a decoder")
        named[WRITER] = identity(writer)
    return named


def row_files(rows: Sequence[str], images: Path, setting: str) -> dict[str, str]:
    """Each file of `rows`, which `setting` names, → its SHA-256, and those of their pictures in the folder `images`.

    Raises:
        InputError: see `pictures`.
    """
    files = [file for name in rows if name not in SCENES for file in text_files(Path(name), setting)]
    return {str(file): sha256_file(file) for file in files} | (pictures(rows, images, setting) if files else {})


def learnt_files(sources: Sequence[str], images: Path | None, setting: str) -> dict[str, str]:
    """Each file that `sources` name → the SHA-256 of it, or of the version of a remote one.

    Args:
        images: the folder of the pictures that rows in `sources` name, which count too; None: they are texts.
        setting: whom errors name.

    Raises:
        InputError: a file cannot be read.
        SetupError: a remote file cannot be reached, or a package is missing that reads one.
    """
    files = [file for source in sources if not source.startswith(_BUILTIN) for file, _ in source_files(source)]
    found = {str(file): sha256_file(file) if isinstance(file, Path) else file.key for file in files}
    return found if images is None else found | pictures(sources, images, setting)


def pictures(rows: Sequence[str], folder: Path, setting: str) -> dict[str, str]:
    """What the pictures in `folder` that `rows` name are, by the beginning and size of each: `folder` → a SHA-256.

    Raises:
        InputError: a picture cannot be read.
        SetupError: see `learnt_files`.
    """
    files = [each for each in rows if not each.startswith(_BUILTIN)]
    if not files:
        return {}
    try:
        taken, _ = take_rows(files, _named, 1.0, Silent(), setting=setting)
    except InputError:  # who reads the rows says what is wrong with them
        return {}
    digest, names = hashlib.sha256(), sorted({name for each in taken for name in each})
    for name in names:
        try:
            if not (folder / name).is_file():  # who reads the rows says which; a pipe would be waited for
                continue
            with open(folder / name, "rb") as file:
                content = content_digest(file.read(_HEAD), os.fstat(file.fileno()).st_size)
        except (OSError, ValueError) as error:
            raise InputError(f"{setting}: {folder / name} cannot be read: {error}; repair or remove it") from None
        digest.update(f"{name}\0{content}\0".encode())
    return {f"pictures in {folder}": digest.hexdigest()} if names else {}


def code_file(spec: str) -> dict[str, str]:
    """FILE.py of "FILE.py:FUNCTION" → its SHA-256; nothing for other words, and where there is no such file, which who
    calls the function says."""
    path = Path(spec.rpartition(":")[0]).expanduser()
    return {str(path): sha256_file(path)} if ".py:" in spec and path.is_file() else {}


def _named(row: Row) -> list[str]:
    """The paths of a row's pictures; others are in the row itself."""
    images = row.get("images", row.get("image"))
    values: list[Any] = images if isinstance(images, list) else [images]
    paths = [each.get("path") if isinstance(each, Mapping) and not each.get("bytes") else each for each in values]
    return [path for path in paths if isinstance(path, str) and Path(path).suffix.lower() in SUFFIXES]
