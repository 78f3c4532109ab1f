"""Documents that hold what models are judged by are taken out: a run of words that stands in an evaluation text too."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.text.documents import read_documents
from penjing.core.text.near_duplicates import word_grams
from penjing.core.text.source_files import files_below
from penjing.curate.documents.document import Document
from penjing.curate.documents.read import conversation_text
from penjing.curate.steps.base import StepConfig

EVALUATION = "builtin:evaluation"
CODE_CHARS = 400_000  # of the standard library: more than `penjing compress` evaluates on by default
_GRAMS = "grams.npy"


class DecontaminateStep(StepConfig):
    """Drop documents that share runs of words with evaluation texts."""

    kind: Literal["decontaminate"] = Field(description="Nothing that models are judged by.")
    against: tuple[str, ...] = Field(
        default=(EVALUATION,),
        description='Files and folders of evaluation texts; "builtin:evaluation" is what penjing itself evaluates on.',
    )
    words: int = Field(default=13, ge=5, description="Words of a run.")
    runs: int = Field(default=1, ge=1, description="A document with so many such runs is dropped.")

    def files(self) -> tuple[Path, ...]:
        """See `StepConfig`."""
        paths = [Path(each) for each in self.against if each != EVALUATION]
        return tuple(file for path in paths if path.exists() for file in files_below(path))

    def prepare(self, folder: Path) -> None:
        """See `StepConfig`."""
        texts = [
            record.text if record.text is not None else conversation_text(record.messages)
            for record in read_documents([Path(each) for each in self.against if each != EVALUATION], "steps.against")
        ]
        if EVALUATION in self.against:
            from penjing.core.text.corpus import code_text, heldout_text  # imports torch

            texts += [heldout_text(), code_text(CODE_CHARS)]
        grams = [found for text in texts if len(found := word_grams(text, self.words))]
        np.save(folder / _GRAMS, np.unique(np.concatenate(grams) if grams else np.empty(0, np.uint64)))

    def filter(self, folder: Path) -> Decontaminate:
        """See `StepConfig`."""
        return Decontaminate(self, np.load(folder / _GRAMS, allow_pickle=False))


class Decontaminate:
    """See `DecontaminateStep`; `known`: sorted hashes of the runs of the evaluation texts."""

    def __init__(self, config: DecontaminateStep, known: NDArray[np.uint64]) -> None:
        self._config, self._known = config, known

    def apply(self, document: Document) -> str | None:
        """See `Filter`."""
        grams = word_grams(document.text, self._config.words)
        if not len(self._known) or not len(grams):
            return None
        places = np.minimum(np.searchsorted(self._known, grams), len(self._known) - 1)
        found = int((self._known[places] == grams).sum())
        return "stands in an evaluation text" if found >= self._config.runs else None
