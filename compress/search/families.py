"""Which networks are searched, and by what, here and on a Ray cluster: each process there opens the network once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penjing.compress.families.base import Family, family_at
from penjing.compress.recipe import Recipe, load_recipe
from penjing.compress.search.base import Changes
from penjing.compress.search.decoder import DecoderTrials
from penjing.compress.search.recipe import Choices
from penjing.compress.search.trial import Trials
from penjing.core.cluster.ray_cluster import RayCluster, RaySettings
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress, Silent
from penjing.core.work import Tasks

Choice = tuple[int, ...]


def open_trials(recipe: Recipe, choices: Choices, family: Family, progress: Progress) -> Changes:
    """The network of a recipe, as its family is searched.

    Raises:
        ConfigError: the family cannot be searched, or the recipe or the choices do not fit it.
        InputError: the checkpoint is damaged.
    """
    kind = DecoderTrials if family.name == "decoder" else Trials
    trials = kind(recipe, choices, family, progress)
    if not trials.space.variables:
        raise ConfigError(
            "space: there is nothing to choose; give widths such as [1.0, 0.75] or bits such as [32, 8], of a decoder "
            "[8, 4], layers=true, or windows such as [512]"
        )
    return trials


class RayDivergences:
    """Measures combinations as tasks of Ray; see `Changes.divergence`.

    Args:
        values: of the base recipe. shared: the folder of the search's work, which every node sees.

    Raises:
        SetupError: see `RayCluster`.
    """

    def __init__(self, settings: RaySettings, values: dict[str, Any], choices: Choices, shared: Path) -> None:
        self._network = json.dumps(values), choices.model_dump_json(), str(shared)
        self._cluster = RayCluster(settings, _divergence, shared)

    def of(self, choices: Sequence[Choice]) -> Iterator[tuple[Choice, float]]:
        """Each combination with its divergence, as they are measured.

        Raises:
            PenjingError: see `RayCluster.results`.
        """
        return self._cluster.results({choice: (*self._network, choice) for choice in choices})


def _divergence(recipe: str, choices: str, shared: str, choice: Choice) -> float:
    return _opened(recipe, choices, shared).divergence(choice)


@lru_cache(maxsize=1)
def _opened(values: str, choices: str, shared: str) -> Changes:
    recipe = load_recipe(json.loads(values))
    given = parse_config(Choices, json.loads(choices), "the search")
    trials = open_trials(recipe, given, family_at(recipe.model), Silent())
    trials.prepare(Tasks(Path(shared)), Silent())
    return trials
