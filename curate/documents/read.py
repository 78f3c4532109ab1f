"""Files of the sources into documents: as they are, out of HTML, out of roff; what is damaged is told."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penjing.core.errors import InputError, PenjingError
from penjing.core.progress import Progress
from penjing.core.remote.files import RemoteFile, is_remote, remote_file
from penjing.core.text.records import LINES, TABLES, AnyFile, Damage, form_of, read_records, said_text
from penjing.core.text.source_files import files_below, remote_files_below
from penjing.curate.documents.debian import fetch_debian
from penjing.curate.documents.document import Document
from penjing.curate.documents.markup import html_text, roff_text
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.documents.warc import SUFFIXES, warc_pages

_TEXTS = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".java", ".tex", ".pod", "")
_HTML = (".html", ".htm", ".xhtml")
_RECORDS = (*LINES, *TABLES)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source: `name` within it, its path or address, and what tells whether it is still the same."""

    source: int
    name: str
    path: str
    size: int
    mtime_ns: int
    version: str = ""

    def opened(self) -> AnyFile:
        """What readers take."""
        return RemoteFile(self.path, self.size, self.version) if is_remote(self.path) else Path(self.path)

    def check(self) -> None:
        """Refuse a file that is not what the plan was made of.

        Raises:
            InputError: changed or gone.
        """
        path = self.opened()
        if isinstance(path, RemoteFile):
            if remote_file(path.address) != path:
                raise InputError(f"{path} was changed while the sources were read; run again")
            return
        stat = path.stat() if path.is_file() else None
        if stat is None or (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise InputError(f"{path} was changed or removed while the sources were read; run again")


def source_files(
    number: int, source: SourceConfig, progress: Progress, without: tuple[Path, ...] = ()
) -> list[SourceFile]:
    """The files of the source `number`, in the order of their names; none of those in the folders `without`.

    Raises:
        InputError: there are none.
        SetupError: a package of Debian cannot be fetched.
    """
    if source.address is not None:
        return _remote_files(number, source, source.address)
    roots = [fetch_debian(package, progress) / (source.path or "") for package in source.packages]
    roots = roots or [Path(source.path or "")]
    found, empty = [], []
    for root in roots:
        if not root.exists():
            raise InputError(f"sources.{source.name}: {root} does not exist; check its path")
        for path in files_below(root):
            name = path.relative_to(root).as_posix() if path != root else path.name
            name = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")  # names are any bytes
            if len(roots) > 1:
                name = f"{source.packages[roots.index(root)]}/{name}"
            own = any(path.absolute().is_relative_to(folder.absolute()) for folder in without)
            if not own and path.is_file() and _wanted(source, path, name):
                stat = path.stat()
                kept = found if stat.st_size else empty
                kept.append(SourceFile(number, name, str(path.absolute()), stat.st_size, stat.st_mtime_ns))
    if not found and empty:
        what = f"{empty[0].path} is" if len(empty) == 1 else f"the {len(empty):,} files from {empty[0].path} on are"
        raise InputError(f"sources.{source.name}: {what} empty, and there is nothing else to read; get it again")
    if not found:
        where = f"sources.{source.name}: {' and '.join(map(str, roots))}"
        if source.files:
            raise InputError(f"{where} holds no file that matches {', '.join(source.files)}")
        raise InputError(
            f"{where} holds no text that is read: files of text, JSON lines, Parquet, Arrow, HTML or WARC; a recipe "
            "names those of another suffix by `files`, and 'penjing curate media' takes images and recordings"
        )
    return found


def _remote_files(number: int, source: SourceConfig, address: str) -> list[SourceFile]:
    below = remote_files_below(address)
    read = [(file, name) for file, name in below if file.address == address or _wanted(source, file, name)]
    wanted = [(file, name) for file, name in read if file.size]
    if not wanted:
        raise InputError(
            f"sources.{source.name}: of the {len(below):,} files of {address} none is read here, or all are "
            "empty; name them by `files`"
        )
    return [SourceFile(number, name, file.address, file.size, 0, file.version) for file, name in wanted]


def _wanted(source: SourceConfig, path: AnyFile, name: str) -> bool:
    if source.files:
        return any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(path.name, pattern) for pattern in source.files)
    form = form_of(path)
    by_form = {"html": _HTML, "records": _RECORDS, "text": _TEXTS, "warc": SUFFIXES}
    if source.form == "roff":
        return True
    return form in by_form.get(source.form, (*_TEXTS[:-1], *_HTML, *_RECORDS, *SUFFIXES))


def read_source(file: SourceFile, source: SourceConfig) -> Iterator[Document | Damage]:
    """The documents of a file, and what of it is damaged: all of it where it cannot be read to its end."""
    path, name = file.opened(), f"{source.name}/{file.name}"
    form = source.form
    if form == "warc" or (form == "auto" and form_of(path) in SUFFIXES):
        yield from _pages(path, name, source)
        return
    if form == "auto":
        form = "html" if form_of(path) in _HTML else "text"
    records = read_records(path, name, source.column)
    while True:
        try:
            record = next(records, None)
        except InputError as error:  # cut off or damaged: what came before it stands
            yield Damage(name, str(error).removeprefix(f"{path} "))
            return
        if record is None:
            return
        if isinstance(record, Damage):
            yield record
            continue
        text = record.text if record.text is not None else conversation_text(record.messages)
        domain = " ".join(str(record.fields.get("domain") or source.domain or source.name).split())
        try:
            text = {"html": html_text, "roff": roff_text}.get(form, str)(text)
            f"{text}{domain}".encode()
        except UnicodeEncodeError:
            yield Damage(record.name, "holds half a surrogate pair, which is no character")
        except PenjingError:
            raise
        except Exception as error:  # a library that fails on a page costs that page, with its reason
            yield Damage(record.name, f"cannot be read as {form}: {type(error).__name__}: {error}")
        else:
            yield Document(record.name, text, source.name, domain, source.licence)


def _pages(path: AnyFile, name: str, source: SourceConfig) -> Iterator[Document | Damage]:
    """The documents of an archive of a crawler."""
    for page in warc_pages(path, name):
        if isinstance(page, Damage):
            yield page
            continue
        called, text, html = page
        try:
            text = html_text(text) if html else text
            text.encode()
        except PenjingError:
            raise
        except Exception as error:  # a library that fails on a page costs that page, with its reason
            yield Damage(called, f"cannot be read as html: {type(error).__name__}: {error}")
        else:
            yield Document(called, text, source.name, source.domain or source.name, source.licence)


def conversation_text(messages: object) -> str:
    """A conversation as text for filters: a paragraph a message."""
    if not isinstance(messages, list):
        return ""
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    return "\n\n".join(filter(None, map(said_text, contents)))
