"""Sources of text: folders of text files, and the two corpora that every Python carries."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from penjing.core.errors import InputError
from penjing.core.text.corpus import calibration_documents

Document = tuple[str, str]  # (name, text)
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".java", ".html", ".tex")


def documents(source: str) -> Iterator[Document]:
    """The documents of `source` in a fixed order.

    Args:
        source: "builtin:prose" (CPython's help topics, 0.5 MB), "builtin:code" (the standard library's modules without
            tests, about 12 MB), "builtin:calibration" (0.5 MB of both that `penjing compress` never evaluates on), or
            a file or folder of UTF-8 text (suffixes `TEXT_SUFFIXES`).

    Raises:
        InputError: no such source, nothing in it, or a file that is not UTF-8.
    """
    if source == "builtin:prose":
        return _prose()
    if source == "builtin:code":
        return _code()
    if source == "builtin:calibration":
        return ((f"{source}/{name}", text) for name, text in calibration_documents())
    if source.startswith("builtin:"):
        raise InputError(
            f"data.sources: {source!r} is unknown; choose builtin:prose, builtin:code, builtin:calibration or a folder"
        )
    return _files(Path(source))


def size_of(source: str) -> int:
    """About how many characters `documents(source)` has, for a progress; 0 where it will be refused."""
    if source.startswith("builtin:"):
        return sum(len(text) for _, text in documents(source))
    return sum(path.stat().st_size for path in _paths(Path(source)))


def is_held_out(name: str, share: float) -> bool:
    """Whether the document `name` belongs to the held-out `share`: decided by its hash, so that it never changes
    sides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < share * 2**64


def _prose() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"builtin:prose/{name}", topics[name]


def _code() -> Iterator[Document]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"} & set(inside.parts):
            continue
        try:
            yield f"builtin:code/{inside}", path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # the library's own samples of other encodings


def _files(source: Path) -> Iterator[Document]:
    if not source.exists():
        raise InputError(f"data.sources: {source} does not exist; name a text file or a folder of them")
    paths = _paths(source)
    if not paths:
        raise InputError(f"data.sources: {source} holds no text file ({', '.join(TEXT_SUFFIXES)})")
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise InputError(f"data.sources: {path} cannot be read as UTF-8 text: {error}") from error
        if text:
            yield path.relative_to(source.parent).as_posix(), text


def _paths(source: Path) -> list[Path]:
    """The files of text in `source`, or itself."""
    if source.is_file():
        return [source]
    return sorted(path for path in source.rglob("*") if path.suffix in TEXT_SUFFIXES)
