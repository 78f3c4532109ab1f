"""Sources of text: files and folders as people have them, and the corpora that every Python carries."""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from penjing.core.errors import InputError
from penjing.core.remote.files import is_remote
from penjing.core.text.corpus import calibration_documents
from penjing.core.text.records import LINES, TABLES, AnyFile, Damage, Record, form_of, read_records
from penjing.core.text.records import size_of as size_of_file
from penjing.core.text.source_files import files_below, is_data_set, remote_files_below

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".java", ".html", ".tex")
BUILTIN = ("builtin:prose", "builtin:code", "builtin:calibration")
_READ = (*TEXT_SUFFIXES, *LINES, *TABLES)


def documents(source: str, column: str | None = None) -> Iterator[Record | Damage]:
    """The documents of `source` in a fixed order; those without text are left out.

    Args:
        source: "builtin:prose" (CPython's help topics, 0.5 MB), "builtin:code" (the standard library's modules without
            tests, about 12 MB), "builtin:calibration" (0.5 MB of both that `penjing compress` never evaluates on), or
            a file (see `read_records`), or a folder (see `files_below`) of which the suffixes `_READ` are taken; or the
            address of either elsewhere, such as s3://bucket/corpus/.
        column: the field of tables and JSON lines that holds the text.

    Raises:
        InputError: no such source, nothing in it, or a file that is damaged as a whole.
        SetupError: a file needs a package that is not installed.
    """
    if source == "builtin:prose":
        return _prose()
    if source == "builtin:code":
        return _code()
    if source == "builtin:calibration":
        return (Record(f"{source}/{name}", text) for name, text in calibration_documents())
    if source.startswith("builtin:"):
        raise InputError(f"data.sources: {source!r} is unknown; choose {', '.join(BUILTIN)}, a file or a folder")
    return _files(source, column)


def size_of(source: str) -> int:
    """About how many bytes `documents(source)` has, for a progress; 0 where it will be refused."""
    if source.startswith("builtin:"):
        return sum(len(record.text or "") for record in documents(source) if isinstance(record, Record))
    return sum(size_of_file(file) for file, _ in source_files(source))


def source_files(source: str) -> list[tuple[AnyFile, str]]:
    """The files of `source` that are read, each with its name in what is said of it.

    Raises:
        InputError, SetupError: a remote source is not there, or cannot be reached.
    """
    if is_remote(source):
        root = source.rstrip("/").rpartition("/")[2]
        found = remote_files_below(source)
        return [
            (file, name if name == root else f"{root}/{name}")
            for file, name in found
            if file.address == source or form_of(file) in _READ
        ]
    path = Path(source)
    if not path.exists():
        return []
    return [
        (file, file.relative_to(path.parent).as_posix())
        for file in files_below(path)
        if file == path or form_of(file) in _READ
    ]


def domain_names(sources: Sequence[str]) -> dict[str, str]:
    """Source → the domain of its documents for mixtures: the end of its path that no other source has, most often its
    name alone."""
    ends = {source: _ends(source.removeprefix("builtin:").rstrip("/")) for source in sources}
    counts = Counter(end for each in ends.values() for end in each)
    return {source: next((end for end in each if counts[end] == 1), each[-1]) for source, each in ends.items()}


def _ends(path: str) -> list[str]:
    """The last name of `path`, the last two, and so on."""
    parts = path.split("/")
    return ["/".join(parts[-length:]) for length in range(1, len(parts) + 1)]


def domain_of(record: Record, name: str) -> str:
    """The domain of a document: what it says itself, else the `name` of its source."""
    said = record.fields.get("domain")
    return said if isinstance(said, str) and said else name


def name_place(name: str) -> float:
    """A number in [0, 1) that follows from `name` alone: a document is held out where it is below the share."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def _prose() -> Iterator[Record]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Record(f"builtin:prose/{name}", topics[name])


def _code() -> Iterator[Record]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"} & set(inside.parts):
            continue
        try:
            yield Record(f"builtin:code/{inside}", path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # the library's own samples of other encodings


def _files(source: str, column: str | None) -> Iterator[Record | Damage]:
    path = Path(source)
    if not is_remote(source) and not path.exists():
        raise InputError(f"data.sources: {source} does not exist; name a file of texts or a folder of them")
    files = source_files(source)
    if not files:
        known = ", ".join(_READ)
        said = "its tables" if not is_remote(source) and path.is_dir() and is_data_set(path) else known
        raise InputError(f"data.sources: {source} holds no file that is read here ({said}, also compressed)")
    for file, name in files:
        for record in read_records(file, name, column):
            if isinstance(record, Damage) or record.text is None or record.text.strip():
                yield record
