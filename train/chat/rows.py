"""Rows of conversations or preferences out of JSON lines and tables, with the place of each and a count of what could
not be taken."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penjing.core.errors import InputError, RequestError, no_json
from penjing.core.progress import Progress, plural
from penjing.core.text.records import DAMAGED, LINES, TABLES, arrow_module, form_of, open_bytes, table_batches
from penjing.core.text.source_files import files_below
from penjing.train.chat.builtin import BUILTIN, builtin_rows

Row = dict[str, Any]
T = TypeVar("T")
_SHOWN = 3  # bad rows that a message names


class RowError(Exception):
    """A row that cannot be learnt from; its text is the reason."""


class TooLongError(Exception):
    """A row that is longer than what a sequence holds."""


@dataclass
class Taken:
    """What became of the rows of some sources: those that were taken, how many were too long, and the bad ones, each
    with its place and the reason."""

    count: int = 0
    too_long: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)

    def places(self) -> str:
        """Where the first bad rows are, each reason once, with the number of further rows of the same."""
        reasons = Counter(reason for _, reason in self.bad)
        first = {reason: where for where, reason in reversed(self.bad)}
        said = list[str]()
        for reason, count in list(reasons.items())[:_SHOWN]:
            said.append(f"{first[reason]}{f' and {count - 1:,} more' if count > 1 else ''}: {reason}")
        if len(reasons) > _SHOWN:
            said.append(f"and {len(reasons) - _SHOWN} other reasons")
        return "; ".join(said)

    def __str__(self) -> str:
        parts = [plural(self.count, "row")]
        if self.too_long:
            parts.append(f"{self.too_long:,} left out because they are longer than a sequence")
        if self.bad:
            reasons = Counter(reason for _, reason in self.bad)
            said = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common(_SHOWN))
            parts.append(f"{len(self.bad):,} left out because they are bad ({said}; the first: {self.bad[0][0]})")
        return "; ".join(parts)


def take_rows(
    sources: Sequence[str] | Iterator[tuple[str, Row]],
    take: Callable[[Row], T],
    most_bad: float,
    progress: Progress,
    section: str = "data",
    setting: str = "",
    most: int | None = None,
) -> tuple[list[T], Taken]:
    """What `take` makes of each row of `sources`, in their order; what became of the others is counted and told.

    Args:
        sources: files, folders and built-in ones; or rows that are there already, each after the place of it.
        take: raises `RowError`, `RequestError` or `TooLongError` for a row that it leaves out.
        most_bad: a larger share of bad rows is an error.
        section: of the recipe, which messages name.
        setting: which names the sources, where that is not `section`.sources; all its rows are to be good.
        most: so many are taken, and what stands behind them is not read; None: all.

    Raises:
        InputError: a source is missing, empty or damaged; too many rows are bad; or none is left.
    """
    kept: list[T] = []
    taken = Taken()
    if isinstance(sources, Iterator):
        named, known, size, rows = section, "", 0, sources
    else:
        named, known = setting or f"{section}.sources", f" {list(sources)}"
        size = sum(path.stat().st_size for each in sources for path in _files(each, named))
        rows = (row for source in sources for row in _rows(source, progress, named))
    progress.start("reading conversations", size)
    for where, row in rows:
        try:
            if isinstance(row, str):
                raise RowError(row)
            kept.append(take(row))
            if len(kept) == most:
                break
        except TooLongError:
            taken.too_long += 1
        except (RowError, RequestError) as error:
            taken.bad.append((where, str(error)))
    progress.finish()
    taken.count = len(kept)
    read = taken.count + taken.too_long + len(taken.bad)
    if taken.bad and len(taken.bad) > most_bad * read:
        raise InputError(
            f"{named}: {len(taken.bad)} of {read} rows are bad: {taken.places()}; correct them"
            + ("" if setting else f", or raise {section}.most_damaged to leave them out")
        )
    if not kept:
        others = "raise data.sequence_length" if section == "data" else "lower data.max_tokens"
        raise InputError(
            f"{named}{known} leave nothing to learn from: {taken}; give other data"
            + ("" if setting else f", or {others}")
        )
    progress.note(f"{named}: {taken}")
    return kept, taken


def _files(source: str, named: str) -> list[Path]:
    if _is_builtin(source):
        return []
    path = Path(source)
    if not path.exists():
        raise InputError(
            f"{named}: {source} does not exist; name a .jsonl or .parquet file, a folder of them, or "
            f"{', '.join(BUILTIN)}"
        )
    files = [each for each in files_below(path) if each == path or form_of(each) in (*LINES, *TABLES)]
    if not files:
        raise InputError(f"{named}: {source} holds no {', '.join((*LINES, *TABLES))} file; name a folder of them")
    for each in files:
        if form_of(each) not in (*LINES, *TABLES):
            raise InputError(f"{named}: {each} is no {', '.join((*LINES, *TABLES))} file, which rows come from")
    return files


def _is_builtin(source: str) -> bool:
    return source.startswith("builtin:")


def _rows(source: str, progress: Progress, named: str) -> Iterator[tuple[str, Row | str]]:
    """(Where, the row, or what is wrong with it) of each."""
    if _is_builtin(source):
        for number, row in enumerate(builtin_rows(source, named), 1):
            yield f"{source}, row {number}", row
    for file in _files(source, named):
        if form_of(file) in TABLES:
            for number, row in enumerate(_table(file, named), 1):
                yield f"{file}, row {number}", row
            progress.advance(file.stat().st_size)
            continue
        try:
            with open_bytes(file) as stream:
                for number, raw in enumerate(stream, 1):
                    progress.advance(len(raw))
                    if raw.strip():
                        yield f"{file}, line {number}", _of_line(raw)
        except DAMAGED as error:
            raise InputError(f"{named}: {file} cannot be read: {error}; get it again") from error


def _of_line(raw: bytes) -> Row | str:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        return f"it is no JSON ({no_json(error)})"
    return row if isinstance(row, dict) else "it is no JSON object"


def _table(file: Path, named: str) -> Iterator[Row]:
    arrow = arrow_module("", file)
    try:
        for batch in table_batches(file):
            yield from map(_without_nulls, batch.to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{named}: {file} cannot be read: {error}; get it again") from error


def _without_nulls(value: Any) -> Any:
    """A table gives every message the keys of all of them, null where it has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
