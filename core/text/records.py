"""Documents out of files as people have them: plain text and JSON lines, compressed or not, Parquet and Arrow tables;
read as a stream, and what is damaged is told with its place and reason.

The one reader of training, calibration and curation.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Any

from penjing.core.errors import UTF16_MARKS, InputError, SetupError, first_line, no_json
from penjing.core.remote.blocks import open_remote
from penjing.core.remote.files import RemoteFile

AnyFile = Path | RemoteFile  # on this machine, or elsewhere
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TEXT_FIELDS = ("text", "content", "messages")
LONGEST_LINE = 256 << 20  # bytes
MOST_BAD_LINES = 0.01  # of a text: with more it is no UTF-8 text at all
_ROWS = 256  # of a table at once
_MOST_NAMES, _LONGEST_NAME = 8, 40  # of fields, in an error
_JSON = {list: "a list", dict: "an object", str: "a text", int: "a number", float: "a number", bool: "true or false"}
_JSON[type(None)] = "null"
_UNPACKED = 50  # times its size that a compressed text longer than LONGEST_LINE may be: text packs 3 to 10 times
_PIECE = 1 << 12  # bytes of a .zst file at once: they unpack to 128 MB at most, four bytes to a block of 128 KB
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)  # what reading a damaged or compressed file raises


@dataclass(frozen=True)
class Record:
    """A document: a text, or a conversation, whose messages are objects of which no more is known (`text` is None).

    Attributes:
        name: its file, as the caller calls it, and its line or row: "notes/a.txt", "chats.jsonl, line 3".
        fields: what else its line or row says.
    """

    name: str
    text: str | None
    messages: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Damage:
    """What could not be read: a document, or with `part` only a line of a text whose others are read."""

    name: str
    reason: str
    part: bool = False


def said_text(content: object) -> str:
    """The text of a message's `content`: of parts theirs, which images have none of; of a call of a tool none."""
    if isinstance(content, list):
        return "".join(said_text(part.get("text") if isinstance(part, dict) else part) for part in content)
    return content if isinstance(content, str) else ""


def form_of(file: AnyFile) -> str:
    """The suffix of `file` without that of a compression, in lower case: ".txt" of "a.txt.gz"."""
    name = Path(file.stem) if file.suffix.lower() in COMPRESSED else file
    return name.suffix.lower()


def read_records(file: AnyFile, name: str, column: str | None = None) -> Iterator[Record | Damage]:
    """The documents of `file` in their order: the rows of a table or of JSON lines, else the file as one text.

    Args:
        name: what the file is called in the names of its documents.
        column: the field that holds the text; by default the first of `TEXT_FIELDS` that is there.

    Raises:
        InputError: the file cannot be opened, its compression or table is damaged, or it has no such column.
        SetupError: it needs a package that is not installed.
    """
    if isinstance(file, Path) and file.exists() and not file.is_file():
        raise InputError(f"{file} is no regular file, and is not read: a pipe or a device may never end")
    form = form_of(file)
    if form in TABLES:
        yield from _rows(file, name, column)
    elif form in LINES:
        yield from _json_lines(file, name, column)
    else:
        yield from _text(file, name)


def open_bytes(file: AnyFile) -> IO[bytes]:
    """The bytes of `file`, decompressed where its suffix is in `COMPRESSED`.

    Raises:
        SetupError: zstandard is needed and not installed, or a remote file cannot be reached.
        InputError: a remote file is gone.
    """
    openers: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}
    packed = openers.get(file.suffix.lower())
    if packed is None:
        return _raw(file)
    return packed(file if isinstance(file, Path) else open_remote(file))


def size_of(file: AnyFile) -> int:
    """Its bytes as it is stored."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def arrow_module(name: str, file: AnyFile) -> Any:
    """pyarrow, or a part of it such as "parquet".

    Raises:
        SetupError: it is not installed.
    """
    try:
        return import_module(f"pyarrow.{name}" if name else "pyarrow")
    except ImportError:
        raise SetupError(f"{file} needs pyarrow, which is not installed: pip install pyarrow") from None


def table_batches(file: AnyFile, columns: Callable[[Any], list[str]] | None = None) -> Iterator[Any]:
    """Arrow's record batches of a file of `TABLES`, of some hundred rows each; .arrow may be a stream or a file.

    Args:
        columns: the names of those that are wanted, of a schema; by default all.

    Raises:
        InputError: the file is compressed as a whole.
        SetupError: pyarrow is not installed.
        ArrowException, OSError: of pyarrow, the file is damaged.
    """
    if file.suffix.lower() in COMPRESSED:
        raise InputError(
            f"{file} is a table that is compressed as a whole, and tables are read from many places at once; unpack it "
            "(Parquet compresses within)"
        )
    arrow = arrow_module("", file)
    if form_of(file) == ".parquet":
        stored = file if isinstance(file, Path) else open_remote(file)
        with arrow_module("parquet", file).ParquetFile(stored) as table:
            yield from table.iter_batches(_ROWS, columns=None if columns is None else columns(table.schema_arrow))
        return
    with arrow.memory_map(str(file)) if isinstance(file, Path) else arrow.PythonFile(open_remote(file)) as stream:
        try:
            reader = arrow.ipc.open_stream(stream)
        except arrow.ArrowInvalid:
            whole = arrow.ipc.open_file(stream)
            reader = (whole.get_batch(index) for index in range(whole.num_record_batches))
        for batch in reader:
            chosen = batch if columns is None else batch.select(columns(batch.schema))
            for begin in range(0, chosen.num_rows, _ROWS):
                yield chosen.slice(begin, _ROWS)


class _Zstd(io.RawIOBase):
    """The bytes of a .zst file of any number of frames; zstandard's own reader takes a cut file for a complete one."""

    def __init__(self, file: Path | IO[bytes]) -> None:
        try:
            self._library = import_module("zstandard")
        except ImportError:
            raise SetupError(f"{file} needs zstandard, which is not installed: pip install zstandard") from None
        self._frame: Any = None
        self._file = open(file, "rb") if isinstance(file, Path) else file  # noqa: SIM115 (closed with this object)
        self._rest, self._ready = b"", memoryview(b"")  # a view: what is left after a read is not copied

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any, /) -> int:
        try:
            while not self._ready and self._more():
                pass
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _more(self) -> bool:
        """Decompress the next piece; False at the end of the file."""
        piece = self._rest or self._file.read(_PIECE)
        if not piece:
            if self._frame is not None:
                raise EOFError("the file ends inside a compressed frame")
            return False
        self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
        self._ready = memoryview(self._frame.decompress(piece))
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return True


def _raw(file: AnyFile) -> IO[bytes]:
    return open(file, "rb") if isinstance(file, Path) else open_remote(file)


def _zstd(file: Path | IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_Zstd(file), 1 << 18)


def _unpacked(stream: IO[bytes], most: int) -> bytes | None:
    """All of `stream`; None where it has more than `most` bytes."""
    parts, size = [], 0
    while part := stream.read(1 << 20):
        parts.append(part)
        size += len(part)
        if size > most:
            return None
    return b"".join(parts)


def _raw_lines(file: AnyFile) -> Iterator[tuple[int, bytes]]:
    """(Number, bytes) of each line; of one longer than `LONGEST_LINE`, so many bytes and one."""
    number = 0
    try:
        with open_bytes(file) as stream:
            while line := stream.readline(LONGEST_LINE + 1):
                number += 1
                yield number, line
                while len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                    line = stream.readline(LONGEST_LINE + 1)
    except DAMAGED as error:
        raise _unreadable(file, number, "line", error) from error


def _unreadable(file: AnyFile, number: int, unit: str, error: Exception) -> InputError:
    after = f" after {unit} {number}" if number else ""
    return InputError(
        f"{file} cannot be read ({first_line(error)}{after}): cut off or damaged; get it again, or leave it out"
    )


def _decoded(raw: bytes) -> tuple[str, str | None]:
    """(Text, what is wrong with it)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if raw[:2] in UTF16_MARKS:
            return "", "cannot be read as UTF-8: it is UTF-16"
        return "", f"cannot be read as UTF-8: byte 0x{raw[error.start]:02x} at place {error.start}"
    return text, "holds the character NUL" if "\0" in text else None


def _json_lines(file: AnyFile, name: str, column: str | None) -> Iterator[Record | Damage]:
    for number, raw in _raw_lines(file):
        if not raw.strip():
            continue
        where = f"{name}, line {number}"
        if len(raw) > LONGEST_LINE:
            yield Damage(where, f"longer than {LONGEST_LINE >> 20} MB")
            continue
        text, wrong = _decoded(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
        if wrong is not None:
            yield Damage(where, wrong)
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield Damage(where, f"not JSON ({no_json(error)})")
            continue
        if isinstance(values, dict):
            yield _of_values(values, where, column)
        else:
            yield Damage(where, f"an object is needed (this is {_JSON[type(values)]})")


def _of_values(values: Mapping[str, Any], where: str, column: str | None) -> Record | Damage:
    if column is not None and column not in values:
        return Damage(where, f"has no field {column!r} (it has {field_names(values)})")
    for key in (column,) if column is not None else TEXT_FIELDS:
        value = values.get(key)
        if isinstance(value, str) or (key == "messages" and key in values):
            if (wrong := _wrong(value) if isinstance(value, str) else _wrong_messages(value)) is not None:
                return Damage(where, wrong)
            fields = {name: each for name, each in values.items() if name != key}
            return Record(where, value, fields=fields) if isinstance(value, str) else Record(where, None, value, fields)
    if column is not None or "text" in values:
        kind = type(values[column or "text"])
        return Damage(where, f"the field {column or 'text'!r} holds no text but {_JSON.get(kind, kind.__name__)}")
    return Damage(where, f'an object with "text" or "messages" is needed (this has {field_names(values)})')


def field_names(values: Mapping[str, Any]) -> str:
    """What the fields are called, for an error; not what they hold, and no long name cut off: of a part curation would
    not find the personal data."""
    names = [repr(name) if len(name) <= _LONGEST_NAME else "a long name" for name in islice(values, _MOST_NAMES)]
    more = f" and {len(values) - _MOST_NAMES:,} more" if len(values) > _MOST_NAMES else ""
    return (", ".join(names) or "no fields") + more


def _wrong(text: str) -> str | None:
    if "\0" in text:
        return "holds the character NUL"
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return "holds half a surrogate pair, which is no character"
    return None


def _wrong_messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return "messages must be a list of objects with role and content"
    found = list[Any](messages)  # JSON may be nested more deeply than Python calls
    while found:
        value = found.pop()
        if isinstance(value, str) and (wrong := _wrong(value)) is not None:
            return wrong
        if isinstance(value, dict):
            found += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            found += value
    return None


def _rows(file: AnyFile, name: str, column: str | None) -> Iterator[Record | Damage]:
    arrow, number = arrow_module("", file), 0
    types = arrow.types
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    plain = (*texts, types.is_integer, types.is_floating)

    def fits(kind: Any) -> bool:
        if types.is_dictionary(kind):  # categories, as pandas calls them
            return any(is_(kind.value_type) for is_ in texts)
        return any(is_(kind) for is_ in plain)

    def wanted(schema: Any) -> list[str]:
        """What can be part of a document: no bytes, no lists but conversations."""
        return [each.name for each in schema if each.name in TEXT_FIELDS or fits(each.type)]

    try:
        for batch in table_batches(file, wanted):
            _check_column(file, batch.schema.names, column)
            for row in batch.to_pylist():
                number += 1
                yield _of_values(row, f"{name}, row {number}", column)
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(file, number, "row", error) from error


def _check_column(file: AnyFile, names: list[str], column: str | None) -> None:
    if column is not None and column not in names:
        raise InputError(f"{file} has no column of text {column!r}; its columns are {', '.join(names) or 'none'}")
    if column is None and not set(TEXT_FIELDS) & set(names):
        raise InputError(
            f"{file} has no column called {' or '.join(TEXT_FIELDS)}; name the one that holds the text "
            f"(data.column): {', '.join(names) or 'it has none'}"
        )


def _text(file: AnyFile, name: str) -> Iterator[Record | Damage]:
    try:
        with open_bytes(file) as stream:
            if file.suffix.lower() not in COMPRESSED:
                raw = stream.read()
            elif (unpacked := _unpacked(stream, max(LONGEST_LINE, _UNPACKED * size_of(file)))) is not None:
                raw = unpacked
            else:
                yield Damage(name, f"unpacks to more than {LONGEST_LINE >> 20} MB and {_UNPACKED} times its size")
                return
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    except DAMAGED as error:
        raise _unreadable(file, 0, "line", error) from error
    text, wrong = _decoded(raw)
    if wrong is None:
        yield from [Record(name, text)] if text.strip() else []
        return
    if raw[:2] in UTF16_MARKS:
        yield Damage(name, f"{wrong}; convert it, for example by iconv -f utf-16 -t utf-8")
        return
    lines, good, bad = raw.split(b"\n"), [], []
    for number, line in enumerate(lines, 1):
        text, wrong = _decoded(line)
        good.append(text)
        if wrong is not None:
            bad.append(Damage(f"{name}, line {number}", wrong, part=True))
            good.pop()
    if len(bad) > max(1, MOST_BAD_LINES * len(lines)) or not "".join(good).strip():
        reason = f"{bad[0].reason} in {bad[0].name.rpartition(', ')[2]}, and {len(bad)} of {len(lines)} lines are so"
        mend = "leave it out" if "NUL" in bad[0].reason else "convert it, for example by iconv -f latin1 -t utf-8"
        yield Damage(name, f"{reason}; {mend}")
        return
    yield from bad
    yield Record(name, "\n".join(good))
