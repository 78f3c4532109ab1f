"""Settings to try, drawn from a space by Optuna's samplers; the first are always those of the base recipe."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from penjing.core.errors import ConfigError, SetupError
from penjing.train.search.recipe import Choices, Range, SearchRecipe, Value

Settings = dict[str, Value]
MIXING = 1_000_003
"""A prime: seeds of different trials differ."""


def starting_point(recipe: SearchRecipe, base: dict[str, Any]) -> Settings:
    """The values that the base recipe has for what varies.

    Args:
        base: the validated base recipe as JSON-ready values.

    Raises:
        ConfigError: it has no such setting, or one outside the space.
    """
    found = {}
    for key, allowed in recipe.space.items():
        value: Any = base
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None or isinstance(value, dict | list):
            raise ConfigError(f"space: {recipe.base} has no value of {key}; give it one by [settings], or leave it out")
        if not _contains(allowed, value):
            raise ConfigError(
                f"space: {key} = {value} of {recipe.base} is not in {_shown(allowed)}; a search begins with the base "
                "recipe, so make the space wider, or begin elsewhere by [settings]"
            )
        found[key] = value
    return found


def with_whole_ranges(recipe: SearchRecipe, start: Settings) -> SearchRecipe:
    """`recipe`, in which each range says whether its numbers are whole: where it left that open, as those of `start`.

    Raises:
        ConfigError: a setting is a whole number, and the ends of its range are not.
    """
    space = dict(recipe.space)
    for key, allowed in recipe.space.items():
        if isinstance(allowed, Range) and allowed.whole is None:
            whole = isinstance(start[key], int)
            if whole and (allowed.low % 1 or allowed.high % 1):
                raise ConfigError(f"space: {key} is a whole number, and {_shown(allowed)} has ends that are not")
            space[key] = allowed.model_copy(update={"whole": whole})
    return recipe.model_copy(update={"space": space})


def _contains(allowed: Range | Choices, value: Any) -> bool:
    if isinstance(allowed, Choices):
        return value in allowed.values
    if isinstance(value, str | bool) or (allowed.whole and value % 1):
        return False
    return allowed.low <= value <= allowed.high


def _shown(allowed: Range | Choices) -> str:
    if isinstance(allowed, Choices):
        return f"{{{', '.join(map(str, allowed.values))}}}"
    return f"[{allowed.low:g}, {allowed.high:g}]{' of whole numbers' if allowed.whole else ''}"


class Drawer:
    """Gives the settings of trial after trial, the same ones for the same recipe and results.

    Args:
        recipe: see `with_whole_ranges`.
        start: the settings of the first trial.

    Raises:
        SetupError: the package optuna is missing.
    """

    def __init__(self, recipe: SearchRecipe, start: Settings) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import optuna
        except ImportError:
            raise SetupError("a search needs the package optuna: pip install 'penjing[search]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._recipe, self._start = optuna, recipe, start
        self.num_trials = recipe.trials
        if recipe.sampler == "grid":
            self._grid = [start, *(each for each in _grid(recipe) if each != start)][: recipe.trials]
            self.num_trials = len(self._grid)

    def draw(self, results: Sequence[tuple[Settings, float | None]]) -> Settings:
        """The settings of the trial after those in `results`: (settings, value of the metric, infinite where the trial
        failed, None while it runs), in the order in which they were drawn."""
        number = len(results)
        if number == 0:
            return self._start
        if self._recipe.sampler == "grid":
            return self._grid[number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an experimental sampler
            return self._ask(number, results)

    def _ask(self, number: int, results: Sequence[tuple[Settings, float | None]]) -> Settings:
        optuna, samplers, seed = self._optuna, self._optuna.samplers, self._recipe.seed
        space = {key: self._distribution(allowed) for key, allowed in self._recipe.space.items()}
        if self._recipe.sampler == "spread":  # a sequence: what comes now is behind all that came before
            study = optuna.create_study(
                sampler=samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False)
            )
            study.add_trial(optuna.create_trial(params=self._start, distributions=space, value=0.0))
            return [study.ask(space) for _ in range(number)][-1].params
        if self._recipe.sampler == "random":
            sampler = samplers.RandomSampler(seed=seed * MIXING + number)
        else:
            sampler = samplers.TPESampler(seed=seed * MIXING + number, multivariate=True, n_startup_trials=4)
        study = optuna.create_study(
            sampler=sampler, direction="minimize" if self._recipe.goal == "lowest" else "maximize"
        )
        for settings, value in results:
            if value is None:
                continue
            ok = abs(value) != float("inf")
            state = optuna.trial.TrialState.COMPLETE if ok else optuna.trial.TrialState.FAIL
            study.add_trial(
                optuna.create_trial(state=state, params=settings, distributions=space, value=value if ok else None)
            )
        return study.ask(space).params

    def _distribution(self, allowed: Range | Choices) -> Any:
        kinds = self._optuna.distributions
        if isinstance(allowed, Choices):
            return kinds.CategoricalDistribution(allowed.values)
        log = allowed.scale == "log"
        if allowed.whole:
            return kinds.IntDistribution(int(allowed.low), int(allowed.high), log=log)
        return kinds.FloatDistribution(allowed.low, allowed.high, log=log)


def _grid(recipe: SearchRecipe) -> Iterator[Settings]:
    """All crossings of equally many points of each range, and of all choices: at most `trials` of them."""
    ranges = [each for each in recipe.space.values() if isinstance(each, Range)]
    choices = 1
    for each in recipe.space.values():
        choices *= len(each.values) if isinstance(each, Choices) else 1
    points = 2
    while ranges and choices * (points + 1) ** len(ranges) <= recipe.trials:
        points += 1
    axes = [each.values if isinstance(each, Choices) else _points(each, points) for each in recipe.space.values()]
    for values in itertools.product(*axes):
        yield dict(zip(recipe.space, values, strict=True))


def _points(allowed: Range, count: int) -> list[float] | list[int]:
    shares = [index / (count - 1) for index in range(count)]
    if allowed.scale == "log":
        found = [allowed.low * (allowed.high / allowed.low) ** share for share in shares]
    else:
        found = [allowed.low + (allowed.high - allowed.low) * share for share in shares]
    return list(dict.fromkeys(round(each) for each in found)) if allowed.whole else found
