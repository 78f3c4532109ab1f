"""`penjing.load` of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

import penjing


def test_a_decoder(tiny_checkpoint: Path) -> None:
    loaded = penjing.load(str(tiny_checkpoint))
    assert isinstance(loaded, penjing.LoadedModel)
    tokens = torch.tensor([loaded.tokenizer.encode("Once upon a time")])
    with torch.inference_mode():
        assert loaded.model(tokens).shape == (*tokens.shape, loaded.config.vocab_size)


def test_a_classifier(classifier: Path) -> None:
    network = penjing.load(classifier)
    assert isinstance(network, penjing.ImageClassifier)
    assert not network.is_artifact
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, *network.config.image_size), dtype=np.uint8)
    logits = network(pixels)
    assert logits.shape == (3, len(network.config.labels))
    assert logits.dtype == np.float32
    with pytest.raises(penjing.InputError, match=r"images are float64 .* give uint8 of shape \(images, 1, "):
        network(pixels / 255)  # pyright: ignore[reportArgumentType]
    with pytest.raises(penjing.InputError, match="give uint8"):
        network(pixels[:, 0])


def test_an_encoder(encoder: Path) -> None:
    network = penjing.load(encoder)
    assert isinstance(network, penjing.TextEncoder)
    vectors = network(["the value of a list", "a python class", "it"])
    assert vectors.shape == (3, network.config.hidden_size)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(network("it"), vectors[2:], atol=1e-5)
    with pytest.raises(penjing.InputError, match="text 1 is int; give a str"):
        network(["a", 3])  # type: ignore[list-item]
    with pytest.raises(penjing.InputError, match="text 0 is NoneType; give a str"):
        network(None)  # type: ignore[arg-type]


def test_refusals(classifier: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(penjing.ConfigError, match=r"device 'cuda': .* family 'classifier'"):
        penjing.load(classifier, device="cuda")
    for device in ("tpu9", "cuda:99", cast("str", 5)):
        with pytest.raises(penjing.ConfigError, match=r"device .* cannot be used here \(.*\); take 'cpu'"):
            penjing.load(tiny_checkpoint, device=device)
    with pytest.raises(penjing.InputError):
        penjing.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"name": "of nothing we know"}))
    with pytest.raises(penjing.InputError, match="names no family"):
        penjing.load(tmp_path)


@pytest.mark.parametrize(("name", "source"), [("net.onnx", "net.onnx"), ("net.py", "net.py:FUNCTION")])
def test_a_file_is_to_be_imported_as_it_is_written(tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(
        penjing.InputError, match=f"is a file, not a model folder; 'penjing import {tmp_path}/{source} F"
    ):
        penjing.load(tmp_path / name)
