"""`search.json`: what a search has measured so far. A search that was ended goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object
from penjing.train.search.halving import Rung
from penjing.train.search.recipe import Value


class Trial(Config):
    """One trial: its settings, and what was measured of it."""

    settings: dict[str, Value] = Field(description="What varies, with this trial's values.")
    evaluations: dict[int, dict[str, float | None]] = Field(
        default={}, description="For each step that was judged: the evaluation; none is a value that is not finite."
    )
    seconds: float = Field(default=0.0, ge=0, description="Time of its processes.")
    reason: str = Field(default="", description="Why it failed; empty otherwise.")

    def value(self, step: int, metric: str) -> float:
        """The metric at a step; infinite where the trial has failed or measured no number.

        Raises:
            ConfigError: the evaluation does not have the metric.
        """
        if self.reason or step not in self.evaluations:
            return float("inf")
        found = self.evaluations[step]
        if metric not in found:
            raise ConfigError(f"metric = {metric!r} is not measured; an evaluation has {', '.join(found)}")
        return float("inf") if (value := found[metric]) is None else value


class SearchState(Config):
    """All of a search."""

    schema_version: int = Field(default=1, ge=1, le=1, description="Of this file.")
    key: str = Field(description="The hash of the search recipe and of the recipe that it varies.")
    base: str = Field(description="The recipe that is varied.")
    metric: str = Field(description="What trials are compared by.")
    goal: str = Field(description="Which values of it are better.")
    rungs: list[tuple[int, int]] = Field(description="Steps and number of trials of each rung.")
    trials: list[Trial] = Field(default=[], description="In the order in which they were drawn.")
    winner: int | None = Field(default=None, description="The number of the best trial of the last rung.")

    @property
    def plan(self) -> list[Rung]:
        """The rungs."""
        return [Rung(steps, trials) for steps, trials in self.rungs]

    def write(self, path: Path) -> None:
        """Replace the file."""
        atomic_write_text(path, json.dumps(self.model_dump(mode="json"), indent=1) + "\n")


def read_search(path: Path) -> SearchState:
    """What `SearchState.write` wrote.

    Raises:
        InputError: the file is missing or damaged.
    """
    try:
        return parse_config(SearchState, read_json_object(path), str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: start the search again with --force") from None
