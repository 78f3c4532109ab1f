"""What a search asks of a network that it changes, whatever its family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penjing.compress.recipe import Recipe
from penjing.compress.search.latency import Clock
from penjing.compress.search.recipe import Workload
from penjing.compress.search.space import Space
from penjing.compress.steps.base import Step
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.core.work import Tasks

S = TypeVar("S", bound=Step)


class Changes(Protocol):
    """A network, and every change of it that a space allows."""

    space: Space
    decides: dict[str, Any]
    """All that a divergence depends on beside the checkpoint, JSON-ready."""

    @property
    def unit(self) -> str:
        """Of a divergence."""
        ...

    @property
    def count(self) -> int:
        """How many samples a divergence is the mean of."""
        ...

    def prepare(self, tasks: Tasks, progress: Progress) -> None:
        """Do once what all divergences need; `tasks` keeps what is costly."""
        ...

    def divergence(self, choice: Sequence[int]) -> float:
        """How far the answers of a combination are from those of the network as it is."""
        ...

    def healed(self, folder: Path, choice: Sequence[int], tasks: Tasks, progress: Progress) -> float:
        """How far the answers of a checkpoint, with the bits of a combination, are from those of the network as it is.

        Args:
            folder: what the steps of `choice` made, all but the one that quantizes.
            tasks: of its own, to keep what is costly.
        """
        ...

    def clock(self, workload: Workload) -> Clock:
        """The runtime that says what each combination takes.

        Raises:
            ConfigError: it cannot run the workload.
            SetupError: it is not there.
        """
        ...

    def point(self, base: dict[str, Any], choice: Sequence[int]) -> list[dict[str, Any]]:
        """The steps of a recipe that makes the network of a combination.

        Args:
            base: values of the base recipe.
        """
        ...


def only_step(recipe: Recipe, kind: type[S]) -> S | None:
    """The step of a kind.

    Raises:
        ConfigError: there are several.
    """
    found = [step for step in recipe.steps if isinstance(step, kind)]
    if len(found) > 1:
        raise ConfigError(
            f"base has {len(found)} steps of kind {found[0].kind!r}, a search varies one; leave out others"
        )
    return found[0] if found else None
