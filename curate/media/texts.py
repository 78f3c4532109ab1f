"""What is said of images and recordings, in files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError

_TEXT_BYTES = 1 << 20


class Texts:
    """What is said of files, beside them."""

    def __init__(self, source: Path) -> None:
        self._lines: dict[Path, str] = {}
        for table in sorted(source.rglob("metadata.jsonl")) if source.is_dir() else ():
            if not table.is_file():  # a pipe would be waited for
                continue
            # not splitlines: captions keep line separators such as U+2028 within a line of JSON
            for line in table.read_text(encoding="utf-8-sig", errors="replace").split("\n"):
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
                    text = beside.read_text(encoding="utf-8-sig")
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
