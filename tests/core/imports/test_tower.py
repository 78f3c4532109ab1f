"""The image tower of two as a graph: the same vectors, of any number of images, and INT8 from there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import penjing
from penjing.compress.run import run_recipe
from penjing.core.artifact.towers import load_embedder
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import InputError
from penjing.core.images.decode import network_input
from penjing.core.imports.graph import graph_options, import_graph, kind_of
from penjing.core.imports.importer import import_model
from tests.core.vision.paired import Kind, write_paired, write_resnet_towers


@pytest.fixture(params=["clip", "siglip", "resnet"])
def towers(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "resnet":
        return write_resnet_towers(tmp_path)
    kind: Kind = request.param
    write_paired(tmp_path / "source", kind)
    return import_model(str(tmp_path / "source"), tmp_path / "made")


def test_its_vectors_are_the_towers(towers: Path, tmp_path: Path) -> None:
    source = f"{towers}:image"
    assert kind_of(source) == "tower"
    network = load_network(import_graph(source, tmp_path / "graph"))
    embedder = load_embedder(towers)
    assert network.config.meaning == "embedding"
    assert network.config.pixels == embedder.pixels
    assert network.config.batched
    images = np.random.default_rng(0).integers(0, 256, (5, 3, *embedder.config.image_size), np.uint8)
    with torch.no_grad():
        (found,) = network(torch.from_numpy(network_input(images, embedder.pixels)))
    np.testing.assert_allclose(found.numpy(), embedder.embed_images(images), atol=1e-6)


def test_one_option_of_images_leaves_the_others_as_they_are_known(tmp_path: Path) -> None:
    towers = write_resnet_towers(tmp_path)
    known = load_embedder(towers).pixels
    network = load_network(import_graph(f"{towers}:image", tmp_path / "graph", graph_options(filter="lanczos")))
    assert network.config.pixels == known.model_copy(update={"filter": "lanczos"})
    assert known.mean != (0.0, 0.0, 0.0)


@pytest.mark.full
def test_it_becomes_int8_beside_the_text_tower(tmp_path: Path) -> None:
    write_paired(tmp_path / "source", "clip")
    towers = import_model(str(tmp_path / "source"), tmp_path / "made")
    (tmp_path / "photos").mkdir()
    images = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), np.uint8)
    for place, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "photos" / f"{place}.png")
    recipe = {
        "model": str(import_graph(f"{towers}:image", tmp_path / "graph")),
        "output": str(tmp_path / "int8"),
        "data": {"images": str(tmp_path / "photos")},
        "measure": {"rounds": 0},
        "steps": [{"kind": "quantize"}],
    }
    artifact = penjing.load(run_recipe(recipe))
    assert isinstance(artifact, penjing.QuantizedNetwork)
    embedder = load_embedder(towers)
    pixels = images.transpose(0, 3, 1, 2).copy()
    (found,) = artifact(torch.from_numpy(network_input(pixels, embedder.pixels)))
    cosines = (np.asarray(found) * embedder.embed_images(pixels)).sum(1)
    assert cosines.min() > 0.99
    assert cosines.max() < 1 - 1e-7  # it is rounded


def test_other_folders_are_named(tmp_path: Path) -> None:
    write_paired(tmp_path / "source", "clip")
    with pytest.raises(InputError, match=r"penjing.json"):
        import_graph(f"{tmp_path / 'source'}:image", tmp_path / "graph")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "other" / "penjing.json").write_text("{}")
    with pytest.raises(InputError):
        import_graph(f"{tmp_path / 'other'}:image", tmp_path / "graph")
    assert not (tmp_path / "graph").exists()
