"""Archives of crawlers, written by warcio."""

from __future__ import annotations

import io
import random
import string
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.core.text.records import Damage
from penjing.curate.documents.document import Document
from penjing.curate.documents.read import read_source, source_files
from penjing.curate.documents.settings import SourceConfig

writer = pytest.importorskip("warcio.warcwriter")
headers_of = pytest.importorskip("warcio.statusandheaders")

PAGE = "<html><head><title>t</title></head><body><main><p>{}</p></main></body></html>"
LONG = "Bäume im Topf brauchen Wasser und Licht, und wer sie pflegt, braucht Geduld. " * 4


def archive(path: Path, answers: list[tuple[str, str, bytes]]) -> Path:
    """An archive of (status, media type, content)."""
    with open(path, "wb") as file:
        out = writer.WARCWriter(file, gzip=path.suffix == ".gz")
        out.write_record(out.create_warcinfo_record(path.name, {"software": "test"}))
        for place, (status, media, content) in enumerate(answers):
            headers = headers_of.StatusAndHeaders(status, [("Content-Type", media)], protocol="HTTP/1.1")
            uri = f"http://site.test/{place}"
            out.write_record(out.create_warc_record(uri, "response", payload=io.BytesIO(content), http_headers=headers))
            out.write_record(out.create_warc_record(uri, "request", payload=io.BytesIO(b"GET / HTTP/1.1\r\n\r\n")))
    return path


def read(path: Path) -> list[Document | Damage]:
    source = SourceConfig(name="web", path=path, domain="crawl")
    return [each for file in source_files(0, source, Silent()) for each in read_source(file, source)]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_pages_are_read_and_nothing_else(tmp_path: Path, name: str) -> None:
    page = PAGE.format(LONG)
    found = read(
        archive(
            tmp_path / name,
            [
                ("200 OK", "text/html; charset=utf-8", page.encode()),
                ("404 Not Found", "text/html", page.encode()),
                ("200 OK", "image/png", b"\x89PNG"),
                ("200 OK", 'text/html; charset="latin-1"', page.encode("latin-1")),
                ("200 OK", "text/html", page.replace("<head>", '<head><meta charset="cp1252">').encode("cp1252")),
                ("200 OK", "text/plain", b"plain"),
                ("200 OK", "text/html; charset=nonsense", page.encode()),
            ],
        )
    )
    documents = [each for each in found if isinstance(each, Document)]
    assert len(documents) == len(found) == 5
    assert [each.text == "plain" for each in documents] == [False, False, False, True, False]
    assert all(each.text.startswith("Bäume im Topf") for each in documents if each.text != "plain")
    assert documents[0].id == f"web/{name}, record 2 (http://site.test/0)"
    assert {each.domain for each in documents} == {"crawl"}
    assert len({each.id for each in documents}) == 5


@pytest.mark.parametrize(
    ("named", "inside", "encoding", "text"),
    [
        ("gb2312", "", "gbk", "朱镕基和他的书"),  # GBK has more signs than GB 2312
        ("", "x-sjis", "cp932", "①髙橋の本"),
        ("euc-kr", "", "cp949", "똠방각하"),
        ("iso-8859-1", "", "cp1252", "“Bäume” – im Topf"),
        ("us-ascii", "", "cp1252", "“Bäume”"),
        ("iso-8859-1", "", "latin-1", "one\x81byte of no sign"),
        ("big5", "", "big5hkscs", "香港嘅樹"),
        ("", "utf-16", "utf-8", "Bäume in the pots"),
        ("undefined", "", "utf-8", "Bäume"),
        ("utf-8", "", "utf-8-sig", "Bäume"),
    ],
)
def test_encodings_are_read_as_browsers_do(tmp_path: Path, named: str, inside: str, encoding: str, text: str) -> None:
    media = f"text/{'html' if inside else 'plain'}" + (f"; charset={named}" if named else "")
    page = PAGE.replace("<head>", f'<head><meta charset="{inside}">').format(text) if inside else text
    path = archive(tmp_path / "a.warc", [("200 OK", media, page.encode(encoding)), ("200 OK", "text/plain", b"after")])
    assert [each.text.strip() for each in read(path) if isinstance(each, Document)] == [text, "after"]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
@pytest.mark.parametrize("missing", [2, 60, 700])
def test_an_archive_that_is_cut_off_keeps_what_came_before(tmp_path: Path, name: str, missing: int) -> None:
    dice = random.Random(0)
    long = "".join(dice.choices(string.ascii_letters, k=9000)).encode()
    whole = archive(tmp_path / name, [("200 OK", "text/plain", b"one"), ("200 OK", "text/plain", long)])
    whole.write_bytes(whole.read_bytes()[:-missing])
    first, *rest = read(whole)
    assert isinstance(first, Document)
    assert first.text == "one"
    assert all(each.text == long.decode() for each in rest if isinstance(each, Document))
    damaged = [each for each in rest if isinstance(each, Damage)]
    assert len(damaged) == 1 or (name == "a.warc" and missing < 100)  # there the end of a request is missing, unread


@pytest.mark.parametrize("name", ["b.warc", "b.warc.gz"])
def test_what_is_no_archive_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no archive at all, but some bytes\n" * 9)
    (damage,) = read(tmp_path / name)
    assert isinstance(damage, Damage)


def test_empty_archives_are_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "a.warc.gz").touch()
    with pytest.raises(InputError, match=r"sources.web: \S+a.warc.gz is empty, and there is nothing else to read"):
        read(tmp_path / "a.warc.gz")
    (tmp_path / "b.warc.gz").touch()
    with pytest.raises(InputError, match=r"the 2 files from \S+a.warc.gz on are empty"):
        read(tmp_path)
    (tmp_path / "c.txt").write_text(LONG)
    assert len(read(tmp_path)) == 1
