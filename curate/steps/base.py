"""What a step is: settings that a recipe gives, and a filter that they make in each process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Protocol

from pydantic import Field

from penjing.core.config import Config
from penjing.core.progress import Progress
from penjing.curate.documents.document import Document
from penjing.curate.learned.facts import Learned


class StepConfig(Config, ABC):
    """What every step says."""

    domains: tuple[str, ...] = Field(
        default=(), description="Only documents of these domains go through the step; by default all."
    )

    def files(self) -> tuple[Path, ...]:
        """Files whose content the step depends on, beside its settings."""
        return ()

    def prepare(self, folder: Path) -> None:
        """Write into `folder` what the filters of all processes need; called once, before them."""

    @abstractmethod
    def filter(self, folder: Path) -> Filter:
        """The work of the step in one process; `folder`: that of `prepare`."""


class LearningStep(StepConfig):
    """A step that learns from documents that the steps before it left."""

    sample: int = Field(
        default=2000, ge=1, description="Documents that the step looks at before it judges all: the same in every run."
    )

    @abstractmethod
    def learn(self, folder: Path, documents: list[Document], kept: Path, progress: Progress) -> Learned:
        """Write into `folder` what the filters of all processes need; called once, before them.

        Args:
            documents: at most `sample` of those that come to the step, of its domains, in the order of their ids.
            kept: a folder for what an ended run should find again.

        Raises:
            InputError: there is too little to learn from.
        """


class Filter(Protocol):
    """One process's part of a step."""

    def apply(self, document: Document) -> str | None:
        """Change `document` in place; the rule that it breaks and is dropped for, or None.

        An exception puts the document into quarantine.
        """
        ...


class Judging(ABC):
    """A filter that counts what judged its documents: `decided`, by name."""

    def __init__(self) -> None:
        self.decided: Counter[str] = Counter()

    @abstractmethod
    def apply(self, document: Document) -> str | None:
        """See `Filter`."""


class Making(Judging):
    """A filter that makes further documents of those that pass it; they go through the steps behind it too."""

    @abstractmethod
    def made(self, document: Document) -> list[Document]:
        """New documents of `document`, which stays; each has `made` and an id of its own.

        An exception puts `document` into quarantine; a `SetupError` ends the run.
        """
