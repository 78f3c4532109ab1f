"""Tars as WebDataset writes them: the files of a sample lie together and share the name up to the first dot.

https://github.com/webdataset/webdataset
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError
from penjing.train.sources.folder import SUFFIXES
from penjing.train.sources.source import Label, Source, content_digest


def read_tar(path: Path, labels: bool) -> Source:
    """The samples of a tar that is not compressed: an image each, and its class as .cls, .txt or "label" of a .json.

    Raises:
        InputError: damaged, compressed, without images, or with a class here and none there.
    """
    images: list[tuple[str, int, int]] = []
    classes: dict[str, Label] = {}
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                key = f"{folder}/{key}"
                if f".{ending.lower()}" in SUFFIXES:
                    images.append((key, member.offset_data, member.size))
                elif ending in ("cls", "json") and member.size < 1 << 20:
                    content = file.extractfile(member)
                    if content is not None and (found := _class(content.read(), ending)) is not None:
                        classes[key] = found
    except (tarfile.TarError, OSError, ValueError, EOFError, RecursionError) as error:
        raise InputError(f"{path} is no whole, uncompressed tar ({error}); unpack it or get it again") from error
    if not images:
        raise InputError(f"{path} holds no images; give a tar with .jpg or .png files")
    keys = [key for key, _, _ in images]
    if labels and classes and (missing := [key for key in keys if key not in classes]):
        raise InputError(f"{missing[0]} in {path} has no class, others have; add it, or set data.labels = false")

    def load(index: int) -> bytes:
        _, begin, size = images[index]
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(size)

    return Source(
        str(path),
        len(images),
        load,
        lambda index: f"{keys[index]} in {path}",
        lambda index: content_digest(load(index)),
        [classes[key] for key in keys] if labels and classes else None,
    )


def _class(content: bytes, ending: str) -> Label | None:
    text: Any = content.decode("utf-8").strip()
    if ending == "json":
        found = json.loads(text)
        text = found.get("label") if isinstance(found, dict) else None
    if text is None or isinstance(text, bool) or not isinstance(text, str | int):
        return None
    return int(text) if isinstance(text, str) and text.isdigit() else text
