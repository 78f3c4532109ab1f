"""What a search recipe says: the run that is varied, what varies, and how many steps are spent on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from penjing.core.cluster.ray_cluster import RaySettings
from penjing.core.config import Config, OutputFolder, parse_config
from penjing.core.errors import ConfigError

Value = bool | int | float | str


class Choices(Config):
    """Values of which a trial has one."""

    values: tuple[Value, ...] = Field(min_length=2, description="The values.")


class Range(Config):
    """Numbers between two ends."""

    low: float = Field(description="The lowest.")
    high: float = Field(description="The highest.")
    scale: Literal["log", "linear"] = Field(
        default="log", description='"log": equal ratios are equally likely, as for learning rates.'
    )
    whole: bool | None = Field(
        default=None, description="Whole numbers only; by default where the setting is a whole number."
    )

    @field_validator("high")
    @classmethod
    def _above(cls, value: float, info: Any) -> float:
        if "low" in info.data and value <= info.data["low"]:
            raise ValueError(f"must be above low = {info.data['low']:g}")
        return value

    @field_validator("scale")
    @classmethod
    def _has_ratios(cls, value: str, info: Any) -> str:
        if value == "log" and info.data.get("low", 1.0) <= 0:
            raise ValueError('needs low above 0; set scale = "linear"')
        return value

    @field_validator("whole")
    @classmethod
    def _ends_are_whole(cls, value: bool | None, info: Any) -> bool | None:
        if value and any(info.data.get(end, 0.0) % 1 for end in ("low", "high")):
            raise ValueError("needs whole numbers as low and high")
        return value


class SearchRecipe(Config):
    """A search by successive halving: all trials run for `first` steps, the best share of them for `factor` times as
    many, and so on to the whole run. A trial goes on from its own state, so that the winner is a run like any other.
    (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", 2016.)"""

    base: Path = Field(description="The training recipe that is varied: a file, or a name of `penjing recipe list`.")
    output: OutputFolder = Field(
        description="The folder of the search: its trials, search.json, report.html and best.toml."
    )
    settings: dict[str, Any] = Field(
        default={}, description='Settings of every trial that are not those of `base`, such as "evaluation.samples".'
    )
    space: dict[str, Range | Choices] = Field(
        min_length=1,
        description='What varies: "section.key" = [low, high], { low, high, scale, whole } or { values = […] }.',
    )
    trials: int = Field(default=16, ge=2, le=10_000, description="How many settings are tried; the first is `base`.")
    first: int = Field(ge=1, description="Steps of every trial before the first are left behind.")
    factor: int = Field(default=4, ge=2, description="One in so many goes on, for so many times the steps.")
    finalists: int = Field(
        default=1,
        ge=1,
        description="Trials that run to the end at least. Early steps prefer settings that learn fast; a second one at "
        "the end costs less than a longer `first`.",
    )
    sampler: Literal["spread", "random", "grid", "tpe"] = Field(
        default="spread",
        description='How settings are chosen: "spread" fills the space evenly (Sobol\'s sequence), "grid" takes equal '
        'distances, "tpe" learns from the trials before (tree-structured Parzen estimator).',
    )
    metric: str = Field(default="loss", description="What trials are compared by, as an evaluation calls it.")
    goal: Literal["lowest", "highest"] = Field(default="lowest", description="Which values of it are better.")
    seed: int = Field(default=0, ge=0, description="Of the choice of settings; the trials have the seed of `base`.")
    workers: int = Field(default=1, ge=1, description="Trials that run at a time, each with its share of the cores.")
    ray: RaySettings | None = Field(
        default=None, description="With this section trials run on a Ray cluster, `workers` of them at a time."
    )

    @field_validator("finalists")
    @classmethod
    def _are_trials(cls, value: int, info: Any) -> int:
        if value > info.data.get("trials", value):
            raise ValueError(f"must be at most trials = {info.data['trials']}")
        return value

    @field_validator("space", mode="before")
    @classmethod
    def _two_numbers_are_a_range(cls, space: Any) -> Any:
        if not isinstance(space, dict):
            return space
        return {key: _allowed(key, _spelled_out(key, given)) for key, given in space.items()}


def _allowed(key: str, given: Any) -> Any:
    """What a setting may be, of the kind that its keys name: tried as both kinds, one mistake is told as many."""
    if not isinstance(given, dict):
        return given
    try:
        return parse_config(Choices if "values" in given else Range, given, key)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _spelled_out(key: str, given: Any) -> Any:
    if not isinstance(given, list):
        return given
    numbers = [each for each in given if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(given) != 2 or len(numbers) != 2:
        raise ValueError(f"{key}: a list is two numbers, the ends of a range; choices are {{ values = {given} }}")
    return {"low": given[0], "high": given[1], "scale": "log" if given[0] > 0 else "linear"}
