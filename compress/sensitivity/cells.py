"""What studies of many measured cells share: a result that is there already, and the time to go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.progress import clock


def already_published(out: Path, record: str, key: str, force: bool) -> dict[str, Any] | None:
    """The result that lies complete in `out` as the JSON file `record`, if it is that of `key`; None if it is to be
    made.

    Raises:
        InputError: `out` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())) or force:
        return None
    if not (out / record).is_file():
        raise InputError(f"{out} exists and holds no {record}, so it is not replaced; choose another output")
    found = read_json_object(out / record)
    if found.get("key") != key:
        raise InputError(
            f"{out} was made from another checkpoint, settings or files that they name, or by another version of "
            "penjing; replace it with --force, or set another output"
        )
    return found


class Remaining:
    """Time to go, by the mean of the cells that were measured in this run."""

    def __init__(self, cells: int) -> None:
        self.done, self._cells, self._measured, self._seconds = 0, cells, 0, 0.0

    @contextmanager
    def timed(self, *, is_kept: bool) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.done += 1
        if not is_kept:
            self._measured += 1
            self._seconds += time.monotonic() - began

    def __str__(self) -> str:
        left = max(0, self._cells - self.done)  # a search measures a few more than it foresaw
        return clock(left * self._seconds / self._measured) if self._measured else "-:--"
