"""A folder of images and recordings → tars as WebDataset has them, and a table of what is known of each."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.manifest import write_manifest
from penjing.core.progress import Progress, Silent
from penjing.core.text.source_files import files_below
from penjing.curate.documents.rows import RowWriter
from penjing.curate.media.audio import SUFFIXES as AUDIO
from penjing.curate.media.audio import read_recording
from penjing.curate.media.images import SUFFIXES as IMAGES
from penjing.curate.media.images import Gallery, hexadecimal, read_picture
from penjing.curate.media.record import MediaRecord

RECORDS, QUARANTINE, DROPPED, REPORT = "records.parquet", "quarantine.jsonl", "dropped.jsonl", "report.json"
MAX_PIXELS = 50_000_000
_MOST_BYTES = 256 << 20  # of a file
_TEXT_BYTES = 1 << 20
_TOGETHER = 1024  # records in one row group
_COLUMN_TYPES: dict[Any, str] = {int: "int64", float: "double"}


def curate_media(
    source: Path,
    output: Path,
    *,
    licence: str = "",
    distance: int = 4,
    max_pixels: int = MAX_PIXELS,
    most_damaged: float = 0.05,
    shard_mb: float = 256,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read a folder of images and recordings, drop what is broken or there twice, and store the rest.

    The text of a file is a .txt of its name, "text" or "caption" of a .json of its name, or its line in a
    metadata.jsonl as Hugging Face's folders have it ("file_name" and "text" or "caption").

    Args:
        distance: images whose perceptual hashes differ in so many of 64 bits are one; -1 drops equal files alone.
        max_pixels: a larger image counts as broken, and is not decoded.
        most_damaged: share of the files that may be broken.
        shard_mb: a tar is closed when it has so many megabytes.

    Returns:
        Counts, as report.json has them.

    Raises:
        InputError: nothing to read, `output` exists, too much is broken, or a file changes while it is read.
        SetupError: a package is missing, or the disk is full.
    """
    progress = progress or Silent()
    if not source.exists():
        raise InputError(f"{source} does not exist; name a folder of images or recordings")
    inside = output.absolute()
    files = [
        path for path in files_below(source)
        if path.suffix.lower() in (*IMAGES, *AUDIO) and path.is_file() and not path.absolute().is_relative_to(inside)
    ]  # fmt: skip
    if not files:
        raise InputError(f"{source} holds no file that ends with {', '.join((*IMAGES, *AUDIO))}")
    told = _Texts(source)
    counts: Counter[str] = Counter()
    looks, seen = Gallery(distance), dict[str, str]()
    with publish_folder(output, replace=force) as partial:
        with ExitStack() as stack:
            kept = {kind: stack.enter_context(_Tars(partial / folder, shard_mb)) for kind, folder in _FOLDERS.items()}
            table = stack.enter_context(_Table(partial / RECORDS))
            broken = stack.enter_context(open(partial / QUARANTINE, "w", encoding="utf-8"))
            dropped = stack.enter_context(open(partial / DROPPED, "w", encoding="utf-8"))
            progress.start("reading images and recordings", len(files))
            for path in files:
                name = _named(path.relative_to(source) if path != source else Path(path.name))
                progress.advance()
                try:
                    content = _content(path)
                    text = told.of(path)
                    digest = hashlib.sha256(content).hexdigest()
                    kind = "image" if path.suffix.lower() in IMAGES else "audio"
                    if digest in seen:
                        raise _TwinError(seen[digest], "equal file")
                    record, data, ending = _record(kind, content, max_pixels, looks, name)
                except InputError as error:
                    counts["damaged"] += 1
                    broken.write(json.dumps({"id": name, "reason": str(error)}) + "\n")
                    continue
                except _TwinError as twin:
                    counts[twin.rule] += 1
                    dropped.write(json.dumps({"id": name, "rule": twin.rule, "twin": twin.name}) + "\n")
                    continue
                seen[digest] = name
                facts = {"source": name, "text": text, "licence": licence, "bytes": len(content), "sha256": digest}
                whole = MediaRecord(key=f"{counts[kind]:08d}", kind=kind, **facts, **record)
                kept[kind].add(whole, data, ending)
                table.add(whole)
                counts[kind] += 1
                counts["with text"] += bool(text)
        if counts["damaged"] > most_damaged * len(files):
            first = json.loads((partial / QUARANTINE).read_text(encoding="utf-8").splitlines()[0])
            raise InputError(
                f"{counts['damaged']:,} of {len(files):,} files are broken, more than {most_damaged:g} of them; the "
                f"first, {first['id']}, {first['reason']}. Remove them, or allow more (--most-damaged)"
            )
        report = {"files": len(files), **{name: counts[name] for name in _COUNTED}}
        (partial / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        settings = {"source": str(source), "distance": distance, "max_pixels": max_pixels, "licence": licence}
        write_manifest(partial, "corpus", {"command": "penjing curate media", **settings}, report)
    return report


_FOLDERS = {"image": "images", "audio": "audio"}
_COUNTED = ("image", "audio", "with text", "equal file", "looks alike", "damaged")


class _TwinError(Exception):
    """Not kept, as `name` is."""

    def __init__(self, name: str, rule: str) -> None:
        super().__init__(name)
        self.name, self.rule = name, rule


def _record(kind: str, content: bytes, max_pixels: int, looks: Gallery, name: str) -> tuple[dict[str, Any], bytes, str]:
    """(Fields of the record, what is stored, ending)."""
    if kind == "audio":
        found = read_recording(content)
        return vars(found), content, found.form.lower()
    picture = read_picture(content, max_pixels)
    if (twin := looks.twin(picture)) is not None:
        raise _TwinError(twin, "looks alike")
    looks.add(picture, name)
    fields = {name: getattr(picture, name) for name in ("form", "width", "height", "changed")}
    return {**fields, "look": hexadecimal(picture.look)}, picture.data, picture.ending


def _content(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise InputError(f"has {size:,} bytes, more than {_MOST_BYTES:,}")
        if not size:
            raise InputError("is empty")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})") from None


def _named(path: Path) -> str:
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class _Texts:
    """What is said of files, beside them."""

    def __init__(self, source: Path) -> None:
        self._lines: dict[Path, str] = {}
        for table in sorted(source.rglob("metadata.jsonl")) if source.is_dir() else ():
            if not table.is_file():  # a pipe would be waited for
                continue
            for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
                row = _parsed(line)
                if isinstance(name := row.get("file_name"), str) and (text := _said(row)):
                    self._lines[table.parent / name] = text

    def of(self, path: Path) -> str:
        """The text of a file, "" where nothing is said.

        Raises:
            InputError: its text is no UTF-8, or holds the character NUL.
        """
        for beside in (path.with_suffix(".txt"), path.with_suffix(".json")):
            if beside.is_file() and beside.stat().st_size <= _TEXT_BYTES:
                try:
                    text = beside.read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise InputError(f"has a text that cannot be read ({error})") from None
                text = text.strip() if beside.suffix == ".txt" else _said(_parsed(text))
                if "\0" in text:
                    raise InputError("has a text with the character NUL")
                if text:
                    return text
        return self._lines.get(path, "")


def _parsed(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _said(values: dict[str, Any]) -> str:
    text = next((values[name] for name in ("text", "caption") if isinstance(values.get(name), str)), "")
    return text.strip().encode("utf-8", "replace").decode("utf-8")


class _Tars:
    """Tars of bounded size; none where nothing is added. Times and owners in them are 0: equal input, equal bytes."""

    def __init__(self, folder: Path, shard_mb: float) -> None:
        self._folder, self._most = folder, shard_mb * 1e6
        self._tar: tarfile.TarFile | None = None
        self._number, self._size = 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def add(self, record: MediaRecord, data: bytes, ending: str) -> None:
        """Append the files of a sample."""
        if self._tar is None:
            self._folder.mkdir(exist_ok=True)
            self._tar = tarfile.open(self._folder / f"{self._number:05d}.tar", "w")  # noqa: SIM115 (closed by _close)
        for name, content in self._files(record, data, ending):
            info = tarfile.TarInfo(f"{record.key}.{name}")
            info.size = len(content)
            self._tar.addfile(info, io.BytesIO(content))
            self._size += len(content)
        if self._size >= self._most:
            self._close()

    def _files(self, record: MediaRecord, data: bytes, ending: str) -> Iterator[tuple[str, bytes]]:
        yield ending, data
        yield "json", json.dumps(record.model_dump(), ensure_ascii=False).encode()
        if record.text:
            yield "txt", record.text.encode()

    def _close(self) -> None:
        if self._tar is not None:
            self._tar.close()
            self._tar, self._size, self._number = None, 0, self._number + 1


class _Table(RowWriter):
    """Records in Parquet."""

    def __init__(self, path: Path) -> None:
        fields = MediaRecord.model_fields.items()
        columns = {name: _COLUMN_TYPES.get(field.annotation, "string") for name, field in fields}
        super().__init__(path, columns, _TOGETHER)

    def add(self, record: MediaRecord) -> None:
        """Append a row."""
        self.write(record.model_dump())
