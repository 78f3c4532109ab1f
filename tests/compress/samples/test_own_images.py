"""Our own classifiers learn from images of the user, and are looked at and judged with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penjing.compress.measure.evaluate import EvaluateSettings, evaluate_classifier
from penjing.compress.samples.data import DataSettings, image_samples
from penjing.core.checkpoint.classifier_config import classifier_config
from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.train.families.base import build_task
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.run import train
from tests.train.sources.photos import folder_of

RECIPE = Path(__file__).parents[3] / "recipes" / "resnet-images.toml"
SMALL = [
    "steps=2", "model.depth=8", "model.width=8", "data.height=12", "data.width=10", "data.batch_size=8", "data.pad=1",
    "data.held_out=0.3", "evaluation.every=2", "monitor.tensorboard=false", "precision.mode=fp32",
]  # fmt: skip


def settings(tmp_path: Path, photos: Path, *more: str) -> list[str]:
    return [*SMALL, f"data.images={photos}", f"output={tmp_path / 'out'}", *more]


def test_a_classifier_of_the_users_images(tmp_path: Path) -> None:
    photos = folder_of(tmp_path / "photos", {"cat": 12, "dog": 12, "owl": 12})
    results = train(RECIPE, settings(tmp_path, photos))
    assert 0 <= results["accuracy"] <= 1
    config = classifier_config(tmp_path / "out")
    assert (config.labels, config.image_size, config.model.in_channels) == (("cat", "dog", "owl"), (12, 10), 3)
    source: dict[str, Any] = {"images": str(photos), "held_out": 0.3}
    samples = image_samples(tmp_path / "out", DataSettings.model_validate(source), Silent())
    held = EvaluateSettings.model_validate(source | {"resamples": 100})
    quality = evaluate_classifier(tmp_path / "out", tmp_path / "out", held, Silent())
    assert quality.samples + len(samples.images.images) == 36
    other = folder_of(tmp_path / "other", {"cat": 2, "fish": 2, "owl": 2})
    with pytest.raises(InputError, match="'fish', which is none"):
        image_samples(tmp_path / "out", DataSettings.model_validate({"images": str(other)}), Silent())


def test_images_need_a_source_and_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs data\.source"):
        build_task(load_recipe(TrainRecipe, RECIPE, [*SMALL, f"output={tmp_path / 'out'}"]), Silent())
    photos = folder_of(tmp_path / "photos", {"": 5})
    with pytest.raises(InputError, match="has no classes"):
        build_task(load_recipe(TrainRecipe, RECIPE, settings(tmp_path, photos)), Silent())
