"""A training recipe as a run needs it: with the [model] of the checkpoint that it begins with."""

from __future__ import annotations

from pathlib import Path

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.config import parse_config, read_recipe
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.recipes import check_stage
from penjing.train.recipe.model import DecoderModel
from penjing.train.recipe.recipe import TrainRecipe

_OWN = {"architecture", "init_std"}  # of a [model], and no part of a config.json


def load_train_recipe(path: Path, overrides: list[str] | None = None) -> TrainRecipe:
    """`load_recipe` of a training recipe. Where `initial` is a decoder, [model] is all of its config.json.

    Raises:
        ConfigError: see `load_recipe`; or [model] is written, and is not what `initial` is: names the settings.
        InputError: `initial` is missing, or damaged.
    """
    values = read_recipe(path, overrides)
    check_stage(values, str(path), "train")
    recipe = parse_config(TrainRecipe, values, str(path))
    if recipe.initial is None:
        if recipe.model is None:
            raise ConfigError(f"{path} has no model; describe one in [model], or name a checkpoint by initial")
        return recipe
    if not recipe.initial.exists():
        raise InputError(f"initial = {recipe.initial} does not exist; name the folder of a checkpoint")
    if family_of(recipe.initial) != "decoder":
        return recipe  # the other families compare when they have read their weights
    found = DecoderModel(architecture="decoder", **open_checkpoint(recipe.initial).config.model_dump())
    if recipe.model is not None:
        _check_same(recipe.model, found, recipe.initial)
    return recipe.model_copy(update={"model": found})


def _check_same(written: object, found: DecoderModel, folder: Path) -> None:
    """Refuse a [model] with a setting that the checkpoint has otherwise; settings that it leaves out are those of the
    checkpoint."""
    if not isinstance(written, DecoderModel):
        raise ConfigError(f"initial = {folder} is a decoder, [model] is not; leave [model] out")
    wrong = [
        f"model.{name} = {getattr(written, name)} (there {getattr(found, name)})"
        for name in type(written).model_fields
        if name in written.model_fields_set - _OWN and getattr(written, name) != getattr(found, name)
    ]
    if wrong:
        raise ConfigError(
            f"initial = {folder} is another model than [model] says: {', '.join(wrong)}; leave [model] out, which then "
            "comes from the checkpoint"
        )
