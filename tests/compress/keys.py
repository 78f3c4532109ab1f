"""By which key a run keeps what a step made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.families.base import family_at
from penjing.compress.measure.evaluate import Quality
from penjing.compress.plan import plan
from penjing.compress.preflight import input_hashes
from penjing.compress.recipe import load_recipe
from penjing.compress.results import Result, Results
from penjing.compress.steps.base import Context
from penjing.core.progress import Silent
from penjing.core.work import WorkFolder


def result_key(values: dict[str, Any], folder: Path) -> str:
    """The key of the result of the first step."""
    recipe = load_recipe(values)
    context = Context(recipe.model, family_at(recipe.model), recipe.data, Silent())
    with WorkFolder(folder / "other", "key") as work:
        results = Results(recipe, context, input_hashes(recipe, context), work)
        return results._key(
            plan(recipe.steps)[0],
            Result("00-model", recipe.model, "model", None, Quality("perplexity", 1.0, 1.0, 1.0, 1, (), "")),
        )
