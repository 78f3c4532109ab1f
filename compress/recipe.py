"""A compression recipe: which model, which samples, which budget, and what is done to it step by step.

model = "build/resnet-fashion"
output = "build/resnet-fashion-pruned"
[guard]
accuracy_points = 1.0
[[steps]]
kind = "prune"
ratio = 0.3
[[steps]]
kind = "distill"
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializeAsAny

from penjing.compress.measure.cost import MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.old_grammar import refuse_old_sections
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.base import Step
from penjing.compress.steps.registry import parse_step
from penjing.core.config import Config, OutputFolder, apply_override, dump_toml, parse_config, read_recipe
from penjing.core.errors import ConfigError
from penjing.core.family import FamilyName, family_of
from penjing.core.recipes import check_stage


class Guard(Config):
    """`[guard]`: how much quality may go, and what happens when more does.

    Steps up to and with a guarded one form a stretch, which is kept, repeated milder, or given up as a whole.
    """

    accuracy_points: float = Field(
        default=1.0, ge=0, description="Most accuracy, or agreement with the model, that may go, in points."
    )
    perplexity_ratio: float = Field(default=1.1, ge=1, description="Most that the perplexity may be multiplied by.")
    similarity_loss: float = Field(
        default=0.02,
        ge=0,
        le=2,
        description="Most that the mean cosine of embeddings, or of a graph's outputs, to the model's may fall "
        "below 1.",
    )
    score_loss: float = Field(
        default=0.01, ge=0, description="Most that the mean of your own metric (evaluate.metric) may fall."
    )
    against: Literal["model", "previous"] = Field(
        default="model", description="What a result is compared with: the recipe's model, or the last guarded result."
    )
    retries: int = Field(default=2, ge=0, le=20, description="How often a stretch is repeated with weaker prunes.")
    milder: float = Field(default=0.5, gt=0, lt=1, description="Factor of what a repeat removes.")
    floor: float = Field(default=0.05, gt=0, lt=1, description="Share below which no repeat goes.")
    otherwise: Literal["stop", "skip"] = Field(
        default="stop", description="When repeats do not help: stop the run, or leave the stretch out and go on."
    )


class Recipe(Config):
    """A whole run."""

    model: Path = Field(description="The checkpoint folder to compress.")
    output: OutputFolder = Field(description="The folder to make.")
    data: DataSettings = Field(default=DataSettings(), description="Samples that the network is looked at with.")
    evaluate: EvaluateSettings = Field(default=EvaluateSettings(), description="Held-out data.")
    measure: MeasureSettings = Field(default=MeasureSettings(), description="What is timed, and for how long.")
    guard: Guard = Field(default=Guard(), description="How much quality may go.")
    steps: tuple[SerializeAsAny[Step], ...] = Field(description="What is done, in order.")

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result: all but where it is read from and written to."""
        return self.model_dump(mode="json", exclude={"model", "output"})


def load_recipe(
    source: Path | dict[str, Any], overrides: list[str] | None = None, family: FamilyName | None = None
) -> Recipe:
    """Read a recipe, a TOML file or its values.

    Args:
        overrides: "steps.0.ratio=0.2", as after `--set`.
        family: of the model; None looks into its folder.

    Raises:
        ConfigError: unreadable, a wrong key or value, a section of an older grammar, or steps in an order that makes no
            sense.
        InputError: the model's folder holds no network that is known.
    """
    name = "the recipe" if isinstance(source, dict) else str(source)
    values = deepcopy(source) if isinstance(source, dict) else read_recipe(source)
    for override in overrides or []:
        apply_override(values, override)
    check_stage(values, name, "compress")
    refuse_old_sections(values, name)
    entries = values.get("steps")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{name}: steps is empty; add a [[steps]] section with kind = 'prune' or 'quantize'")
    if family is None:
        model = values.get("model")
        if not isinstance(model, str | Path):
            raise ConfigError(f"{name}: model = {model!r}: name the checkpoint folder to compress")
        family = family_of(Path(model))
    steps = tuple(parse_step(each, place, family, name) for place, each in enumerate(entries))
    recipe = _with_held_out(parse_config(Recipe, values | {"steps": steps}, name))
    for place, step in enumerate(steps):
        try:
            step.check_order(steps[:place], steps[place + 1 :])
        except ConfigError as error:
            raise ConfigError(f"{name}: steps.{place}: {error}") from None
    return recipe


def _with_held_out(recipe: Recipe) -> Recipe:
    """The recipe whose evaluation, without a source of its own, takes what [data] holds out of its source."""
    data, evaluate = recipe.data, recipe.evaluate
    if data.source is None or evaluate.source is not None:
        return recipe
    shared = evaluate.model_copy(update=data.source_settings() | {"held_out": data.held_out})
    return recipe.model_copy(update={"evaluate": shared})


def recipe_toml(recipe: Recipe) -> str:
    """The recipe with every default and override written out, as TOML that `penjing compress` reads again."""
    return dump_toml(recipe.model_dump(mode="json"))
