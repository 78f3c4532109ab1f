"""Text as it was meant: wrongly decoded characters (ftfy), one form of Unicode, no control characters, even white
space. Words, case and punctuation stay."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Literal

from pydantic import Field

from penjing.curate.documents.document import Document
from penjing.curate.documents.needs import needed
from penjing.curate.steps.base import StepConfig

_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\u200b\u2060\ufeff\ufff9-\ufffb]")
# from the first blank of a run, and never back: else a run of n blanks inside a line takes n² steps
_TRAILING = re.compile(r"(?<![^\S\n])[^\S\n]++(?=\n|$)")
_BLANK = re.compile(r"\n{4,}")


class CleanStep(StepConfig):
    """Mend encodings, Unicode and white space."""

    kind: Literal["clean"] = Field(description="Mended text.")
    mojibake: bool = Field(default=True, description="Text that was decoded wrongly, such as Ã© for é, is mended.")
    shortest: int = Field(default=1, ge=1, description="Characters that a document has at least.")
    longest: int = Field(default=10_000_000, ge=1, description="Characters that a document has at most.")

    def filter(self, folder: Path) -> Clean:
        """See `StepConfig`."""
        return Clean(self)


class Clean:
    """See `CleanStep`."""

    def __init__(self, config: CleanStep) -> None:
        self._config = config
        # quotes and ligatures were meant; entities stay in what is no HTML
        self._ftfy = needed("ftfy")
        self._mending = self._ftfy.TextFixerConfig(
            unescape_html=False,
            uncurl_quotes=False,
            fix_latin_ligatures=False,
            fix_character_width=False,
            explain=False,
        )

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        before = document.text
        if len(before) > self._config.longest:
            return "too long"
        text = before
        if self._config.mojibake and not text.isascii():
            mended = self._ftfy.fix_text(text, self._mending)
            if mended != unicodedata.normalize("NFC", text):
                document.changed.append("clean: mended characters")
            text = mended
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\u2028", "\n")
        text = _BLANK.sub("\n\n\n", _TRAILING.sub("", _CONTROL.sub("", text))).strip("\n")
        if text != before:
            document.text = text
            document.changed.append("clean")
        return "too short" if len(text.strip()) < self._config.shortest else None
