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
from penjing.train.sources.packed import unpacked
from penjing.train.sources.source import Label, Source, content_digest


def read_tar(path: Path, labels: bool, texts: bool = False) -> Source:
    """The samples of a tar: an image each, and its class as .cls or "label" of a .json.

    Args:
        texts: in place of classes, what is said of each image: as .txt, or "text" or "caption" of a .json.

    Raises:
        InputError: damaged, without images, or with a class here and none there; see `unpacked`.
        SetupError: a compressed one has no room on the disk.
    """
    plain = unpacked(path)
    images: list[tuple[str, int, int]] = []
    classes: dict[str, Label] = {}
    try:
        with tarfile.open(plain, "r:") as file:
            for member in file:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                key, _, ending = base.partition(".")
                key = f"{folder}/{key}"
                if f".{ending.lower()}" in SUFFIXES:
                    images.append((key, member.offset_data, member.size))
                elif ending in ("txt" if texts else "cls", "json") and member.size < 1 << 20:
                    content = file.extractfile(member)
                    read = _text if texts else _class
                    if content is not None and (found := read(content.read(), ending)) is not None:
                        classes[key] = found
    except (tarfile.TarError, OSError, ValueError, EOFError, RecursionError) as error:
        raise InputError(f"{path} is no whole tar ({error}); get it again") from error
    if not images:
        raise InputError(f"{path} holds no images; give a tar with .jpg or .png files")
    keys = [key for key, _, _ in images]
    if labels and not texts and classes and (missing := [key for key in keys if key not in classes]):
        raise InputError(f"{missing[0]} in {path} has no class, others have; add it, or set data.labels = false")

    def load(index: int) -> bytes:
        _, begin, size = images[index]
        with open(plain, "rb") as file:
            file.seek(begin)
            return file.read(size)

    return Source(
        str(path),
        len(images),
        load,
        lambda index: f"{keys[index]} in {path}",
        lambda index: content_digest(load(index)),
        [classes.get(key, "") for key in keys] if labels and classes else None,
    )


def _class(content: bytes, ending: str) -> Label | None:
    text: Any = content.decode("utf-8").strip()
    if ending == "json":
        found = json.loads(text)
        text = found.get("label") if isinstance(found, dict) else None
    if text is None or isinstance(text, bool) or not isinstance(text, str | int):
        return None
    return int(text) if isinstance(text, str) and text.isdecimal() else text


def _text(content: bytes, ending: str) -> str | None:
    text: Any = content.decode("utf-8").strip()
    if ending == "json":
        found = json.loads(text)
        found = found if isinstance(found, dict) else {}
        text = next((found[name] for name in ("text", "caption") if name in found), None)
    return text if isinstance(text, str) else None
