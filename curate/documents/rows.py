"""Rows of one Parquet file, written in groups of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penjing.core.text.records import arrow_module


class RowWriter:
    """Writes rows into `path`. What is left when the context ends with an error is not written.

    Args:
        path: of the file.
        columns: name → Arrow's type, such as "string".
        most: a group is written as soon as its rows are so large together.
    """

    def __init__(self, path: Path, columns: Mapping[str, str], most: int) -> None:
        arrow, parquet = arrow_module("", path), arrow_module("parquet", path)
        self._schema = arrow.schema([(name, arrow.type_for_alias(kind)) for name, kind in columns.items()])
        self._open, self._table = parquet.ParquetWriter, arrow.Table
        self._path, self._most = path, most
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def __enter__(self) -> Self:
        self._writer = self._open(self._path, self._schema, compression="zstd")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def write(self, row: dict[str, Any], size: int = 1) -> None:
        """Append a row of this size, in whatever `most` counts."""
        self._rows.append(row)
        self._size += size
        if self._size >= self._most:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(self._table.from_pylist(self._rows, schema=self._schema))
        self._rows, self._size = [], 0
