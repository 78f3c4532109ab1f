"""Tables with a column of images or of texts: Parquet, Arrow (as Hugging Face `datasets` writes it), JSON lines."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError, first_line, no_json
from penjing.core.text.records import LINES, arrow_module
from penjing.train.sources.folder import RECORDING, SUFFIXES
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Label, Source, Values, content_digest

_IMAGES = ("image", "img", "images", "png", "jpg", "jpeg", "pixels", "picture", "photo", "file_name", "path")
_TEXTS = ("text", "sentence", "content")
_LONGEST_LINE = 256 << 20  # characters: an image in base64 has fewer
_LABELS = ("label", "labels", "class", "cls", "target")


def read_table(path: Path, settings: SourceSettings) -> Source:
    """The rows of a .parquet, .arrow or .jsonl file.

    Raises:
        InputError: damaged, empty, or without such columns.
        SetupError: pyarrow is needed and not installed.
    """
    if path.suffix.lower() in LINES:
        rows, classes = json_rows(path), {}
        names = list(dict.fromkeys(name for row in rows for name in row))
        column, written = _held(path, names, settings, lambda name: True)
        values: Sequence[Any] = [row.get(column) for row in rows]
        label = _column(path, names, settings.label_column, _LABELS, "label_column", None) if settings.labels else None
        raw = [row.get(label) for row in rows] if label else None
    else:
        table, classes = arrow_table(path)
        names, schema = table.column_names, table.schema
        column, written = _held(path, names, settings, lambda name: _is_image(schema.field(name)))
        label = _column(path, names, settings.label_column, _LABELS, "label_column", None) if settings.labels else None
        stored = table.column(column)
        values = _Lazy(len(stored), lambda index: stored[index].as_py())
        raw = table.column(label).to_pylist() if label else None
    if not len(values):
        raise InputError(f"{path} has no rows; give a table that has")
    labels = None if raw is None else [_label(path, value, classes.get(label or "", ())) for value in raw]

    def load(index: int) -> Values:
        said = f"column {column!r}"
        return text_at(values[index], said) if written else encoded_image(values[index], path.parent, said)

    def digest(index: int) -> int:
        if written:
            return content_digest(str(values[index]).encode())
        return content_digest(encoded_image(values[index], path.parent, f"column {column!r}"))

    return Source(str(path), len(values), load, lambda index: f"row {index} of {path}", digest, labels)


class _Lazy(Sequence[Any]):
    def __init__(self, size: int, at: Callable[[int], Any]) -> None:
        self._size, self._at = size, at

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return self._at(index)


def json_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines.

    Raises:
        InputError: it cannot be read, or a line is no object.
    """
    rows, number = [], 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), ""), 1):
                if len(line) > _LONGEST_LINE:
                    raise InputError(
                        f"line {number} of {path} has more than {_LONGEST_LINE >> 20} MB; write it in parts"
                    )
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise InputError(f"line {number} of {path} is no JSON object; write one a line")
                    rows.append(row)
    except JSONDecodeError as error:
        said = f"line {number} is no JSON ({no_json(error)})"
        raise InputError(f"{path} cannot be read as JSON lines: {said}; write one JSON object a line") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON lines: {error}; write one JSON object a line") from error
    return rows


def arrow_table(path: Path) -> tuple[Any, dict[str, Sequence[str]]]:
    """The table of a .parquet or .arrow file, and the classes of each column that Hugging Face's metadata names.

    Raises:
        InputError: damaged.
        SetupError: pyarrow is needed and not installed.
    """
    pa, pq = arrow_module("", path), arrow_module("parquet", path)
    try:
        if path.suffix.lower() == ".parquet":
            table = pq.read_table(path, partitioning=None)
        else:
            with pa.memory_map(str(path)) as file:
                try:
                    table = pa.ipc.open_stream(file).read_all()
                except pa.ArrowInvalid:
                    table = pa.ipc.open_file(file).read_all()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read ({first_line(error)}); get it again") from error
    classes: dict[str, Sequence[str]] = {}
    try:
        described = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
        for name, feature in described.get("info", {}).get("features", {}).items():
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                classes[name] = tuple(map(str, feature["names"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: its Hugging Face metadata is damaged ({error}); get it again") from None
    return table, classes


def _is_image(field: Any) -> bool:
    kind = str(field.type)
    return "bytes: binary" in kind if kind.startswith("struct<") else kind in ("binary", "large_binary")


def _held(path: Path, names: Sequence[str], settings: SourceSettings, fits: Callable[[str], bool]) -> tuple[str, bool]:
    """The column that the samples are in, and whether they are texts."""
    if settings.text_column is not None and settings.column is not None:
        raise InputError(
            f"data.column = {settings.column!r} and data.text_column = {settings.text_column!r}: give one, for images "
            "or for texts"
        )
    if settings.text_column is not None:
        column = _column(path, names, settings.text_column, _TEXTS, "text_column", None)
        assert column is not None
        return column, True
    images = settings.column or any(name in names and fits(name) for name in _IMAGES)
    if not images and (column := next((name for name in _TEXTS if name in names), None)):
        return column, True
    column = _column(path, names, settings.column, _IMAGES, "column", fits)
    assert column is not None
    return column, False


def _column(
    path: Path,
    names: Sequence[str],
    wanted: str | None,
    usual: Sequence[str],
    setting: str,
    fits: Callable[[str], bool] | None,
) -> str | None:
    """The column that is meant; None where none is wanted and none is needed (`fits` is None)."""
    if wanted is not None:
        if wanted not in names:
            raise InputError(f"{path} has no column {wanted!r}; data.{setting} may be {', '.join(names)}")
        return wanted
    for name in usual:
        if name in names and (fits is None or fits(name)):
            return name
    if fits is None:
        return None
    raise InputError(
        f"{path} has the columns {', '.join(names) or 'none'}, of which none is known to hold images or texts; name "
        f"it by data.{setting}, or data.text_column; numbers come in a .npz file, or from FILE.py:FUNCTION"
    )


def encoded_image(value: Any, folder: Path, where: str) -> bytes:
    """The file that a cell of a table holds: bytes, base64, or a path inside `folder`; as such or as "bytes" or "path".

    Raises:
        InputError: it holds none of these, or the file cannot be read.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise InputError(f"{where} holds no image but {type(value).__name__}")
    if Path(value).suffix.lower() in (*SUFFIXES, RECORDING):
        place = folder / value
        try:
            place = place.resolve()
            if not place.is_relative_to(folder.resolve()):
                raise InputError(f"{value} lies outside {folder}")
            if not place.is_file():
                raise InputError(f"{place} is no file")
            return place.read_bytes()
        except OSError as error:
            raise InputError(f"{place} cannot be read: {error.strerror}") from error
        except ValueError as error:  # a NUL, half a surrogate pair
            raise InputError(f"{value!r} can be the name of no file ({error})") from None
    try:
        return base64.b64decode(value.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{where} holds neither the name of an image nor base64") from None


def _label(path: Path, value: Any, names: Sequence[str]) -> Label:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputError(
            f"{path} holds a class that is no name and no number ({value!r}); mend it, or set data.labels = false"
        )
    if isinstance(value, int) and names:
        if not 0 <= value < len(names):
            raise InputError(f"{path} holds class {value}, its metadata name {len(names)}; get it again")
        return names[value]
    return value


def text_at(value: Any, where: str) -> str:
    """The text that a cell of a table holds.

    Raises:
        InputError: it holds none.
    """
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{where} holds no text{'' if isinstance(value, str) else f' but {type(value).__name__}'}")
    return value
