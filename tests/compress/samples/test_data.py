"""Calibration samples: of the right kind, normalised, the same on every pass; losses against a model of our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penjing.compress.families.base import family_at
from penjing.compress.samples import data
from penjing.compress.samples.data import DataSettings, ImageData, Samples
from penjing.core.checkpoint.classifier import ClassifierConfig, save_classifier
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import cifar_resnet
from penjing.core.progress import Silent
from penjing.train.data.images import ImageSet

FEW = DataSettings(images=50, batch_images=16, tokens=256, window=64, batch_windows=3)


def noise(split: str, progress: object = None) -> ImageSet:
    generator = np.random.default_rng({"train": 0, "test": 1}[split])
    images = generator.integers(0, 256, (80, 1, 12, 12), dtype=np.uint8)
    return ImageSet(images, generator.integers(0, 10, 80, dtype=np.uint8), 10)


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "load_fashion", noise)
    return _save(tmp_path / "classifier", 12)


def _save(folder: Path, side: int) -> Path:
    torch.manual_seed(0)
    network = cifar_resnet(8, width=4, in_channels=1)
    config = ClassifierConfig(
        model=network, image_size=(side, side), mean=(0.5,), std=(0.25,), labels=tuple(map(str, range(10)))
    )
    folder.mkdir()
    save_classifier(folder, config, ResNet(network), {})
    return folder


def opened(folder: Path) -> Samples:
    return family_at(folder).samples(folder, FEW, Silent())


def test_a_classifier_sees_normalised_training_images(classifier: Path) -> None:
    found = opened(classifier)
    batches = [images for (images,) in found.inputs()]
    assert [len(batch) for batch in batches] == [16, 16, 16, 2]
    wanted = (torch.from_numpy(noise("train").images[:50]) / 255 - 0.5) / 0.25
    torch.testing.assert_close(torch.cat(batches), wanted)
    assert all(torch.equal(first, again) for first, (again,) in zip(batches, found.inputs(), strict=True))


def test_losses_of_images_are_their_cross_entropy(classifier: Path) -> None:
    found = opened(classifier)
    assert isinstance(found, ImageData)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 10))
    losses = list(found.losses(model))
    (images,) = zip(*found.inputs(), strict=True)
    labels = torch.from_numpy(noise("train").labels[:50].astype(np.int64))
    wanted = F.cross_entropy(model(torch.cat(images)), labels)
    sizes = torch.tensor([16.0, 16, 16, 2])
    torch.testing.assert_close((torch.stack(losses) * sizes).sum() / 50, wanted)
    losses[0].backward()
    assert model[1].weight.grad is not None


def test_a_decoder_sees_windows_and_its_loss_is_that_of_the_next_token(tiny_checkpoint: Path) -> None:
    found = opened(tiny_checkpoint)
    batches = [tokens for (tokens,) in found.inputs()]
    assert [tuple(tokens.shape) for tokens in batches] == [(3, 64), (1, 64)]
    model = load_model(tiny_checkpoint).model
    last = list(found.losses(model))[-1]
    with torch.no_grad():
        logs = model(batches[1]).log_softmax(-1)[0]
    wanted = -torch.stack([logs[place, token] for place, token in enumerate(batches[1][0, 1:])]).mean()
    torch.testing.assert_close(last.detach(), wanted)


def test_what_does_not_fit_is_refused(
    classifier: Path, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(InputError, match=r"takes images of \(1, 16, 16\) in 10 classes, Fashion-MNIST has \(1, 12, 12"):
        opened(_save(tmp_path / "other", 16))
    short = make_tiny_checkpoint(max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"data.window=64 is longer than the context of 32 tokens"):
        opened(short)
    with pytest.raises(ValueError, match="tokens=100 is not a multiple of window=64"):
        DataSettings(tokens=100, window=64)
