"""One server with an HTTP front for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penjing.compress.run import run_recipe
from penjing.core.artifact.onnx_encoder import EncoderArtifact, open_encoder_artifact
from penjing.core.imports.importer import import_model
from tests.core.models.encoders import small_recipe, write_sentence_transformer
from tests.serve.front.asking import HEADER_TIMEOUT, Fronted
from tests.serve.triton.serving import serving

LIMITS = {"max_num_sequences": 8, "max_waiting_requests": 8}


@pytest.fixture(scope="session")
def tiny_long(make_tiny_checkpoint: Callable[..., Path]) -> Path:
    """The tiny model with a context of 4096 tokens, so that an answer can take seconds."""
    return make_tiny_checkpoint(max_position_embeddings=4096)


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> EncoderArtifact:
    """A small INT8 text encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    checkpoint = import_model(str(write_sentence_transformer(folder / "source")), folder / "tiny")
    return open_encoder_artifact(run_recipe(small_recipe(checkpoint, folder / "small-int8")))


@pytest.fixture(scope="package")  # not longer: an idle server takes time too
def front(tiny_long: Path) -> Iterator[Fronted]:
    """The front of a Triton server with the tiny model: 8 sequences run at once, 8 may wait."""
    limits = {"header_timeout": HEADER_TIMEOUT, "body_timeout": HEADER_TIMEOUT}
    with serving(tiny_long, LIMITS, front={"limits": limits}) as served:
        yield Fronted(served)
