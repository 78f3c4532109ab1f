"""What a step is: settings that a recipe gives, and a filter that they make in each process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from pydantic import Field

from penjing.core.config import Config
from penjing.curate.documents.document import Document


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


class Filter(Protocol):
    """One process's part of a step."""

    def apply(self, document: Document) -> str | None:
        """Change `document` in place; the rule that it breaks and is dropped for, or None.

        An exception puts the document into quarantine.
        """
        ...
