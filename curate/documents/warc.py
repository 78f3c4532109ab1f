"""Pages out of the archives that crawlers write (WARC, ISO 28500): each answer with status 200 that is HTML or text.

Read as a stream, by warcio. Also archives of Common Crawl, whose records are compressed one by one; WET files, which
hold text instead of answers, are read too.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO

from penjing.core.text.records import AnyFile, Damage, open_bytes
from penjing.curate.documents.needs import needed

SUFFIXES = (".warc", ".wet")
_MOST_BYTES = 64 << 20  # of a page; what is longer is no text for people
_HTML = ("text/html", "application/xhtml+xml")
_CHARSET = re.compile(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]{2,40})", re.IGNORECASE)
_WIDER = {  # https://encoding.spec.whatwg.org/#names-and-labels, by Python's names and by labels that it does not know
    **dict.fromkeys(("iso8859-1", "ascii"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift_jis", "x-sjis", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc_kr", "windows-949", "ks_c_5601-1989"), "cp949"),
    **dict.fromkeys(("tis-620", "iso8859-11", "windows-874"), "cp874"),
    "iso8859-9": "cp1254",
    "big5": "big5hkscs",
    "x-euc-jp": "euc_jp",
    "iso-8859-8-i": "iso8859-8",
}
_CHUNK = 1 << 16
_SNIFFED = 4096  # bytes at the beginning of a page that may name its encoding


def warc_pages(path: AnyFile, name: str) -> Iterator[tuple[str, str, bool] | Damage]:
    """(Name of the record, text, whether it is HTML) of the pages of an archive, and what is damaged.

    A record is named by its place and address: "a.warc.gz, record 3 (https://…)".
    """
    iterator = needed("warcio.archiveiterator").ArchiveIterator
    place = known = 0
    with open_bytes(path) as file:
        stream = _Told(file)
        try:
            for record in iterator(stream):
                place += 1
                if record.format != "warc":  # warcio takes any five words for a record of ARC
                    continue
                known += 1
                address = record.rec_headers.get_header("WARC-Target-URI") or ""
                kind = _kind(record)
                if kind is None:
                    continue
                called = f"{name}, record {place} ({address[:300]})"
                content = record.content_stream().read(_MOST_BYTES + 1)
                if len(content) > _MOST_BYTES:
                    yield Damage(called, f"is longer than {_MOST_BYTES >> 20} MB")
                    continue
                if record.raw_stream.limit > 0 and not record.raw_stream.read(1):
                    raise EOFError("its last record is shorter than it says")
                text = _decoded(content, kind[1], kind[0] in _HTML)
                yield Damage(called, "is in no encoding that it names") if text is None else (
                    called, text, kind[0] in _HTML
                )  # fmt: skip
            if stream.error is not None:
                raise stream.error
            if not known:
                yield Damage(name, "holds no record of an archive (WARC)")
        except (OSError, EOFError, ValueError, zlib.error, needed("warcio.exceptions").ArchiveLoadFailed) as error:
            yield Damage(f"{name}, after record {place}", f"is damaged or cut off: {error}")


class _Told:
    """A compressed stream that ends where it is damaged, and says so: warcio takes a cut file for a whole one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._read: Callable[[int], bytes] = getattr(file, "read1", file.read)
        self.error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, none at the end."""
        try:
            return self._read(size if size >= 0 else _CHUNK)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            self.error = error
            return b""


def _kind(record: object) -> tuple[str, str] | None:
    """(Media type, encoding that it names or "") of a page; None of what is none."""
    headers = getattr(record, "http_headers", None)
    said = getattr(record, "rec_type", "")
    if said == "conversion":
        return "text/plain", "utf-8"
    if said != "response" or headers is None or headers.get_statuscode() != "200":
        return None
    media, _, more = (headers.get_header("Content-Type") or "text/html").partition(";")
    found = re.search(r"charset\s*=\s*[\"']?([\w.:-]+)", more, re.IGNORECASE)
    media = media.strip().lower()
    return (media, found[1] if found else "") if media in (*_HTML, "text/plain") else None


def _decoded(content: bytes, named: str, html: bool) -> str | None:
    """Text of `content` in the encoding that its answer or page names, else UTF-8, else Windows-1252."""
    found = _CHARSET.search(content[:_SNIFFED]) if html else None
    inside = found[1].decode("ascii") if found else ""
    if inside.lower().startswith(("utf-16", "utf-32")):  # it could not be found in these
        inside = ""
    for encoding in (_as_browsers(named), named, _as_browsers(inside), inside, "utf-8", "cp1252"):
        try:
            return content.decode(encoding or "utf-8").removeprefix("\ufeff")
        except (UnicodeError, LookupError):  # also of names such as "undefined", which Python knows as an encoding
            continue
    return None


def _as_browsers(label: str) -> str:
    """The encoding that browsers take for the one called `label`: most that is called Latin-1 is Windows-1252."""
    try:
        known = codecs.lookup(label).name
    except LookupError:
        known = label.lower()
    return _WIDER.get(known, label)
