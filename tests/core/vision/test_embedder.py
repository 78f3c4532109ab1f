"""Vectors of images and texts, each by itself, by a ResNet beside a BERT."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import penjing
from penjing.core.artifact.towers import load_embedder
from penjing.core.checkpoint.towers import load_towers
from penjing.core.errors import InputError
from penjing.core.vision.embedder import Embedder
from tests.core.vision.paired import write_resnet_towers

TEXTS = ["the name of a list", "python", "it returns the value of an object and the name of the class"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_resnet_towers(tmp_path_factory.mktemp("towers"))


def pixels(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 10, 8), np.uint8)


def test_vectors_are_the_networks(folder: Path) -> None:
    embedder = penjing.load(folder)
    assert isinstance(embedder, Embedder)
    images = pixels(3)
    values = torch.from_numpy((images.astype(np.float32) / 255 - 0.5) / 0.25)
    model = load_towers(folder)
    with torch.no_grad():
        wanted = model(values, *embedder.tokenizer(TEXTS).tensors())
    found = embedder.embed_images(images)
    np.testing.assert_allclose(found, wanted.images.numpy(), atol=1e-6)
    np.testing.assert_allclose(embedder.embed_texts(TEXTS), wanted.texts.numpy(), atol=1e-6)
    files = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
        files.append(file.getvalue())
    assert np.array_equal(embedder.embed_images(files), found)


def test_neither_company_nor_threads_move_a_bit(folder: Path) -> None:
    one, many = load_embedder(folder, threads=1), load_embedder(folder, threads=4)
    images = pixels(6)
    assert np.array_equal(one.embed_images(images), many.embed_images(images))
    assert np.array_equal(one.embed_images(images[2:3])[0], many.embed_images(images)[2])
    assert np.array_equal(one.embed_texts(TEXTS[0])[0], many.embed_texts(TEXTS)[0])
    assert many.embed_texts(TEXTS).shape == (3, 12)


def test_what_cannot_be_embedded_is_one_line(folder: Path) -> None:
    embedder = load_embedder(folder, threads=1)
    for bad, said in (
        ([], "there is no image to embed"),
        ([b"x"], "it is no JPEG or PNG image"),
        (pixels(1)[:, :, :4], r"give uint8 of shape \(N, 3, 10, 8\)"),
        (pixels(1)[0], "give uint8 of shape"),
        (pixels(1).astype(np.float32), "images are float32"),
    ):
        with pytest.raises(InputError, match=said):
            embedder.embed_images(bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="there is no text"):
        embedder.embed_texts([])


def test_what_is_no_file_and_no_text_is_named(folder: Path) -> None:
    embedder = load_embedder(folder)
    file = io.BytesIO()
    Image.fromarray(pixels(1)[0].transpose(1, 2, 0)).save(file, "PNG")
    assert embedder.embed_images(file.getvalue()).shape == (1, 12)
    for images, said in (
        (["cat.png"], r"image 0 is str; give the bytes of files, as open\(path, 'rb'\).read\(\) gives them"),
        ([file.getvalue(), None], "image 1 is NoneType; give the bytes"),
        (3, "image 0 is int; give the bytes"),
        ([file.getvalue(), b"hello"], "image 1 cannot be read: it is no JPEG or PNG"),
    ):
        with pytest.raises(InputError, match=said):
            embedder.embed_images(images)  # type: ignore[arg-type]
    for texts, said in (
        (None, "text 0 is NoneType; give a str"),
        (["a", 3], "text 1 is int; give a str"),
        (["a", "b", "no \ud800"], r"text 2 cannot be written in UTF-8 \(surrogates not allowed at sign 3\)"),
    ):
        with pytest.raises(InputError, match=said):
            embedder.embed_texts(texts)  # type: ignore[arg-type]
