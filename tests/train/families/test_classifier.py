"""An image classifier from recipe to checkpoint, on small made-up images in place of Fashion-MNIST."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier, save_classifier
from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import BlockConfig, ResNetConfig, StageConfig
from penjing.core.progress import Silent
from penjing.train.data.fashion import CLASSES, load_fashion
from penjing.train.data.images import Images, ImageSet
from penjing.train.data.stream import one_pass
from penjing.train.families import classifier as vision
from penjing.train.families.base import build_checkpoint_task, build_task
from penjing.train.families.classifier import ImageClassification
from penjing.train.recipe.data import FashionData, SampleData
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.run import train, train_task

RECIPE = """
output = "{folder}/out"
steps = 50
device = "cpu"
[model]
architecture = "resnet"
depth = 8
width = 4
[data]
kind = "fashion-mnist"
batch_size = 32
erase = 2
[optimizer]
name = "sgd"
weight_decay = 5e-4
[learning_rate]
peak = 0.1
[objective]
label_smoothing = 0.05
[evaluation]
every = 50
samples = 100
[monitor]
tensorboard = false
"""


def made_up(split: str, progress: object = None) -> ImageSet:
    """Noise on a texture that is the class's."""
    generator = np.random.default_rng({"train": 0, "test": 1}[split])
    labels = generator.integers(0, 10, 320, dtype=np.uint8)
    textures = np.random.default_rng(7).integers(0, 150, (10, 1, 12, 12), dtype=np.uint8)
    images = textures[labels] + generator.integers(0, 100, (320, 1, 12, 12), dtype=np.uint8)
    return ImageSet(images, labels, 10)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vision, "load_fashion", made_up)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


@pytest.mark.parametrize("settings", [[], ["data.micro_batch=16"], ["precision.mode=bf16", "memory.recompute=full"]])
def test_a_classifier_learns_and_is_loaded_with_its_accuracy(recipe: Path, tmp_path: Path, settings: list[str]) -> None:
    results = train(recipe, settings)
    assert results["accuracy"] > 0.5
    model, config = load_classifier(tmp_path / "out")
    data = made_up("test").first(100)
    mean, std = np.array(config.mean, np.float32), np.array(config.std, np.float32)
    (batch,) = one_pass(Images(data, mean, std), micro_batch=100)
    with torch.no_grad():
        right = (model(batch["images"]).argmax(1) == batch["targets"]).float().mean()
    assert right.item() == pytest.approx(results["accuracy"], abs=1e-6)
    assert config.labels[9] == "Ankle boot"
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    speeds = [record["images_per_s"] for record in records if "images_per_s" in record]  # others are alarms
    assert speeds
    assert min(speeds) > 0


def test_the_next_command_makes_an_artifact_of_the_same_samples(recipe: Path, tmp_path: Path) -> None:
    task = build_task(load_recipe(TrainRecipe, recipe), Silent())
    assert task.next_command(tmp_path / "a") == f"penjing compress quantize {tmp_path}/a {tmp_path}/a-int8"
    assert isinstance(task, ImageClassification)
    task._data = SampleData(kind="samples", batch_size=4, source="my photos/")
    assert task.next_command(Path("a")) == "penjing compress quantize a a-int8 --set 'data.source=my photos/'"


def test_training_goes_on_from_a_classifier(recipe: Path, tmp_path: Path) -> None:
    first = train(recipe)
    again = train(recipe, [f"output={tmp_path}/next", f"initial={tmp_path}/out", "learning_rate.peak=1e-6", "steps=1"])
    assert again["accuracy"] == pytest.approx(first["accuracy"], abs=0.1)
    with pytest.raises(InputError, match=r"initial = .* is of another architecture than \[model\]"):
        train(recipe, [f"output={tmp_path}/other", f"initial={tmp_path}/out", "model.width=8"])


def test_models_and_data_must_fit(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.depth=9 is not 6·n \+ 2; take 8, 14"):
        train(recipe, ["model.depth=9"])
    with pytest.raises(ConfigError, match=r"data.kind = 'text' does not fit model.architecture = 'resnet'"):
        train(recipe, ['data={kind="text", sequence_length=8, batch_size=4}'])


@pytest.mark.full
def test_fashion_mnist_is_what_its_authors_say() -> None:
    train_set, test_set = load_fashion("train"), load_fashion("test")
    assert train_set.images.shape == (60000, 1, 28, 28)
    assert np.bincount(train_set.labels).tolist() == [6000] * 10
    assert np.bincount(test_set.labels).tolist() == [1000] * 10


@pytest.mark.parametrize(("width", "expected"), [(4, False), (8, True)])
def test_convolutions_have_channels_last_where_that_is_safe(recipe: Path, width: int, expected: bool) -> None:
    """Width 4 has a strided 1×1 convolution of 4 channels, whose gradient corrupts memory in that layout."""
    task = build_task(load_recipe(TrainRecipe, recipe, [f"model.width={width}"]), Silent())
    weights = [module.weight for module in task.build_model().modules() if isinstance(module, torch.nn.Conv2d)]
    wide = [weight for weight in weights if weight.shape[1] > 1 and weight.shape[2] > 1]
    assert [weight.is_contiguous(memory_format=torch.channels_last) for weight in wide] == [expected] * len(wide)


def test_a_ready_classifier_trains_on_with_its_widths_and_normalisation(recipe: Path, tmp_path: Path) -> None:
    run = load_recipe(TrainRecipe, recipe, ["steps=1"])
    data = run.data
    assert isinstance(data, FashionData)
    model = ResNetConfig(
        in_channels=1,
        num_classes=10,
        stem="cifar",
        stem_channels=3,
        block="basic",
        stages=(StageConfig(channels=3, blocks=(BlockConfig(hidden=(5,)),)),),
    )
    config = ClassifierConfig(model=model, image_size=(12, 12), mean=(0.25,), std=(0.5,), labels=CLASSES)
    (tmp_path / "given").mkdir()
    save_classifier(tmp_path / "given", config, ResNet(model), {})
    ready = run.model_copy(update={"initial": tmp_path / "given", "model": None})
    train_task(ready, lambda progress: build_checkpoint_task(tmp_path / "given", ready, progress), command="tests")
    assert load_classifier(tmp_path / "out")[1] == config
    other = config.model_copy(update={"image_size": (28, 28)})
    with pytest.raises(InputError, match=r"the model has image size \(28, 28\), the data \(12, 12\)"):
        ImageClassification(ready, other, data, Silent())


@pytest.mark.parametrize("width", [4, 8])
def test_a_resumed_classifier_is_the_one_that_was_not_stopped(recipe: Path, tmp_path: Path, width: int) -> None:
    settings = ["steps=9", "checkpoint.every=5", "evaluation.every=0", "average=0.9", f"model.width={width}"]
    train(recipe, [*settings, f"output={tmp_path}/whole"])
    train(recipe, settings)
    newest = tmp_path / "out-run/checkpoints/step-000000009"
    shutil.rmtree(newest)
    train(recipe, settings, resume="auto", force=True)
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert max((whole[name] - resumed[name]).abs().max() for name in whole) == 0
