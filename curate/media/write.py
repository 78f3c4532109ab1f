"""Records → tars as WebDataset has them, and a table."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penjing.curate.documents.rows import RowWriter
from penjing.curate.media.record import MediaRecord

_TOGETHER = 1024  # records in one row group
_COLUMN_TYPES: dict[Any, str] = {int: "int64", float: "double", float | None: "double"}


class Tars:
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


class Table(RowWriter):
    """Records in Parquet."""

    def __init__(self, path: Path) -> None:
        fields = MediaRecord.model_fields.items()
        columns = {name: _COLUMN_TYPES.get(field.annotation, "string") for name, field in fields}
        super().__init__(path, columns, _TOGETHER)

    def add(self, record: MediaRecord) -> None:
        """Append a row."""
        self.write(record.model_dump())
