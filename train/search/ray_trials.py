"""Trials on a Ray cluster: a lost node costs its trials what they did since their last checkpoint, and no more."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penjing.core.cluster.ray_cluster import RayCluster, RaySettings
from penjing.train.search.trial import Outcome, Trials


class RayTrials:
    """Runs trials as tasks of Ray; see `Runs`.

    Args:
        shared: the folder of all trials, which every node sees.

    Raises:
        SetupError: see `RayCluster`.
    """

    def __init__(self, settings: RaySettings, shared: Path) -> None:
        self._threads = max(math.floor(settings.cpus), 1)
        self._cluster = RayCluster(settings, _trial, shared)

    def run(self, recipe: Path, overrides: list[str], until: int, folder: Path) -> Outcome | None:
        """See `Runs`."""
        name = f"{folder.name} to step {until}"
        found = self._cluster.run(name, self._threads, str(recipe), overrides, until, str(folder))
        return None if found is None else Outcome(**found)

    def stop(self) -> None:
        """See `Runs`."""
        self._cluster.stop()


def _trial(threads: int, recipe: str, overrides: list[str], until: int, folder: str) -> dict[str, Any] | None:
    found = Trials(threads).run(Path(recipe), overrides, until, Path(folder))
    return None if found is None else asdict(found)
