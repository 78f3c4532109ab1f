"""Which networks are searched, and by what."""

from __future__ import annotations

from penjing.compress.families.base import Family
from penjing.compress.recipe import Recipe
from penjing.compress.search.base import Changes
from penjing.compress.search.decoder import DecoderTrials
from penjing.compress.search.recipe import Choices
from penjing.compress.search.trial import Trials
from penjing.core.progress import Progress


def open_trials(recipe: Recipe, choices: Choices, family: Family, progress: Progress) -> Changes:
    """The network of a recipe, as its family is searched.

    Raises:
        ConfigError: the family cannot be searched, or the recipe or the choices do not fit it.
        InputError: the checkpoint is damaged.
    """
    kind = DecoderTrials if family.name == "decoder" else Trials
    return kind(recipe, choices, family, progress)
