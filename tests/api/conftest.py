"""The small training recipe of tests/train, and checkpoints of the families to load."""

from __future__ import annotations

from pathlib import Path

import pytest

import penjing
from tests.compress.classifiers import write_classifier
from tests.core.models.encoders import write_sentence_transformer
from tests.train.conftest import recipe, shards

__all__ = ["recipe", "shards"]  # fixtures


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small ResNet. Read only."""
    return write_classifier(tmp_path_factory.mktemp("classifier") / "resnet")


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small BERT. Read only."""
    folder = tmp_path_factory.mktemp("encoder")
    source = write_sentence_transformer(folder / "source")
    return penjing.import_model(source, folder / "bert")
