"""Any network of images as an encoder of a decoder that sees, and as a tower: from recipe to what is served."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penjing.compress.graph.own import tower_networks
from penjing.compress.run import run_recipe
from penjing.core.artifact.base import read_report_file
from penjing.core.artifact.towers import load_embedder
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.graph import load_network, save_graph
from penjing.core.checkpoint.load import load_model
from penjing.core.checkpoint.towers import load_towers
from penjing.core.checkpoint.vision_language import load_vision_language
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.files import publish_folder
from penjing.core.graph.config import Pixels
from penjing.core.graph.trace import from_torch
from penjing.core.vision.graph_eyes import GraphEyes, eyes_of
from penjing.core.vision.projector import TwoLayers
from penjing.core.vision.sight import pictures_of
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sight.eyes import Eyes
from penjing.train.run import train
from tests.core.models.encoders import write_sentence_transformer
from tests.serve.tiny import run_all, text_of
from tests.train.families import test_towers, test_vision_language

SIDE = 8
sight_recipe, tower_recipe = test_vision_language.recipe, test_towers.recipe


class Conv(nn.Module):
    """A convolution with a norm, places, and their mean as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.Linear(12, 5)

    def features(self, images: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(images)))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.features(images).mean((2, 3)))


class Tokens(nn.Module):
    """Patches behind a class token, which alone is given; images have their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 12, 4, 4), nn.Parameter(torch.randn(1, 1, 12))
        self.norm = nn.LayerNorm(12)

    def features(self, images: Tensor) -> Tensor:
        x = self.patches(images.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([self.token.expand(x.shape[0], 1, 12), x], 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images)[:, 0]


def as_graph(folder: Path, model: nn.Module, **pixels: Any) -> Path:
    torch.manual_seed(1)
    given: dict[str, Any] = {"height": SIDE, "width": SIDE, "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.4)}
    shown = Pixels(**given | pixels)
    shape = (2, SIDE, SIDE, 3) if shown.layout == "NHWC" else (2, 3, SIDE, SIDE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_var is not None and module.running_mean is not None  # noqa: PT018
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.running_mean, -1.0, 1.0)
    network = from_torch(model.eval(), keyword={"images": torch.randn(shape)}, meaning="classes", pixels=shown)
    with publish_folder(folder) as partial:
        save_graph(partial, network, {"command": "a test"})
    return folder


def with_model(recipe: Path, text: str) -> list[str]:
    """The recipe with another section [model.vision]."""
    lines = recipe.read_text().splitlines()
    begin, end = lines.index("[model.vision]"), lines.index("[data]")
    recipe.write_text("\n".join([*lines[:begin], *text.splitlines(), *lines[end:]]))
    return []


def answers(folder: Path, images: Path) -> list[str]:
    engine = load_engine(folder, EngineConfig(num_blocks=64, max_num_sequences=2))
    params = SamplingParams(temperature=0.0, max_tokens=6)
    asked = [
        Request(str(n), "<image>What is it?", params, images=((images / f"{n}.png").read_bytes(),)) for n in range(2)
    ]
    found = run_all(engine, asked)
    return [text_of(found[str(n), 0]) for n in range(2)]


def test_a_resnet_begins_anew_and_a_decoder_learns_to_see_by_it(sight_recipe: Path, tmp_path: Path) -> None:
    with_model(sight_recipe, 'resnet_size = 8\nresnet = { architecture = "resnet", depth = 8, width = 4 }')
    assert train(sight_recipe)["exact"] > 0.9
    assert family_of(tmp_path / "out") == "vision_language"
    model = load_vision_language(tmp_path / "out")
    assert isinstance(model.vision, GraphEyes)
    assert (model.vision.config.hidden_size, model.vision.config.places) == (16, 4)
    assert answers(tmp_path / "out", tmp_path) == ["red", "green"]
    opened = open_checkpoint(tmp_path / "out")
    for name, parameter in model.decoder.named_parameters():
        assert torch.equal(opened.get(name), parameter)
    sight = load_model(tmp_path / "out").sight
    assert sight is not None
    pictures = [pictures_of(sight.config, (tmp_path / f"{n}.png").read_bytes())[0] for n in range(5)]
    together = Eyes(sight, 1)(pictures)
    assert all(Eyes(sight, 2)([each])[0].equal(rows) for each, rows in zip(pictures, together, strict=True))
    text = sight_recipe.read_text()
    begin, end = text.index("[model]"), text.index("[data]")
    sight_recipe.write_text(f'initial = "{tmp_path}/out"\n' + text[:begin] + text[end:])
    further = train(sight_recipe, ["steps=1", "evaluation.every=1", "learning_rate.peak=1e-9", f"output={tmp_path}/b"])
    assert further["exact"] > 0.9


@pytest.mark.parametrize("kind", ["conv", "tokens"])
def test_a_network_that_was_imported_sees_and_goes_into_an_artifact(
    sight_recipe: Path, tmp_path: Path, kind: str
) -> None:
    network, pixels = (Conv(), {"order": "BGR", "scale": 128.0}) if kind == "conv" else (Tokens(), {"layout": "NHWC"})
    folder = as_graph(tmp_path / "net", network, **pixels)
    with_model(sight_recipe, f'graph = "{folder}"\nscale_factor = 2')
    before = copy.deepcopy(load_network(folder).module.state_dict())
    train(sight_recipe, ["steps=3", "evaluation.every=3", 'freeze=["vision.*"]', "learning_rate.peak=1e-3"])
    model = load_vision_language(tmp_path / "out")
    assert isinstance(model.vision, GraphEyes)
    for name, tensor in model.vision.graph.state_dict().items():  # statistics of its norms, too
        assert torch.equal(tensor, before[name]), name
    # What it sees is what the network computes of the image as that network takes it.
    values = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3)).astype(np.float32)
    mean, std = (np.array(each, np.float32) for each in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    scale, turn = (128.0, -1) if kind == "conv" else (255.0, 1)
    own = torch.from_numpy(((values[..., ::turn] / scale - mean) / std).copy())
    with torch.no_grad():
        found = network.features(own if kind == "tokens" else own.permute(0, 3, 1, 2))
        wanted = found[:, 1:] if kind == "tokens" else found.flatten(2).transpose(1, 2)
        look = model.config.look
        given = (values / 255 - np.array(look.mean, np.float32)) / np.array(look.std, np.float32)
        seen = model.vision(torch.from_numpy(given.astype(np.float32)).permute(0, 3, 1, 2))
    torch.testing.assert_close(seen, wanted, atol=1e-4, rtol=1e-4)
    if kind == "tokens":
        return
    step = {"kind": "quantize", "questions": [str(tmp_path / "rows.jsonl")], "question_images": str(tmp_path)}
    made = {
        "model": str(tmp_path / "out"), "output": str(tmp_path / "int8"), "data": {"tokens": 128, "window": 16},
        "evaluate": {"prose_tokens": 128, "code_tokens": 0, "window": 32}, "measure": {"rounds": 0}, "steps": [step],
    }  # fmt: skip
    artifact = run_recipe(made)
    assert read_report_file(artifact)["stages"][-1]["record"]["images"]["logprob_difference"]["mean"] < 0.1
    assert answers(artifact, tmp_path)


@pytest.mark.parametrize("kind", ["vit", "graph", "classifier node"])
def test_towers_of_other_kinds_learn_and_become_integers(tower_recipe: Path, tmp_path: Path, kind: str) -> None:
    folder = as_graph(tmp_path / "net", Conv())
    image = (
        'image = { architecture = "vit", patch_size = 4, hidden_size = 16, intermediate_size = 32, '
        "num_hidden_layers = 1, num_attention_heads = 2 }"
    )
    if kind != "vit":
        node = ', node = "relu"' if "node" in kind else ""
        image = f'image = {{ architecture = "graph", folder = "{folder}"{node} }}'
    lines = tower_recipe.read_text().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("image = "))
    tower_recipe.write_text("\n".join([*lines[:at], image, *lines[at + 1 :]]))
    assert train(tower_recipe)["image_to_text_at_1"] > 0.6
    towers = load_towers(tmp_path / "out")
    files = [(tmp_path / f"{place}.png").read_bytes() for place in range(3)]
    found = load_embedder(tmp_path / "out").embed_images(files)
    images = torch.randn(3, 3, SIDE, SIDE)
    with torch.no_grad():
        (traced,) = tower_networks(towers)["image"](images)
        torch.testing.assert_close(traced, towers.of_images(images), atol=1e-6, rtol=1e-5)
    pairs = str(tmp_path / "pairs.jsonl")
    made = {
        "model": str(tmp_path / "out"), "output": str(tmp_path / "int8"),
        "data": {"source": pairs}, "evaluate": {"source": pairs}, "measure": {"rounds": 0},
        "steps": [{"kind": "quantize", "target": "onnxruntime-cpu", "parity_bound": 0.2}],
    }  # fmt: skip
    if kind == "graph":
        integers = load_embedder(run_recipe(made)).embed_images(files)
        assert float((integers * found).sum(1).min()) > 0.95


def test_what_cannot_see_is_refused_by_name(sight_recipe: Path, tmp_path: Path) -> None:
    folder = as_graph(tmp_path / "net", Conv())
    write_sentence_transformer(tmp_path / "text", layers=1)
    text = sight_recipe.read_text()
    for section, error, said in (
        ('graph = "nowhere"', InputError, "nowhere"),
        (f'graph = "{tmp_path}/text"', InputError, "holds a text encoder; an encoder is a graph"),
        (f'graph = "{folder}"\nnode = "none"', InputError, "no floating result 'none'"),
        (f'graph = "{folder}"\nscale_factor = 3', ConfigError, "4 patches of a side cannot be joined 3"),
        (f'graph = "{folder}"\nresnet = {{ architecture = "resnet", depth = 8 }}', ConfigError, "resnet and graph"),
        ("", ConfigError, "got none"),
        ('resnet = { architecture = "resnet", depth = 9 }', ConfigError, "depth"),
    ):
        sight_recipe.write_text(text)
        with_model(sight_recipe, section)
        with pytest.raises(error, match=said):
            train(sight_recipe)
    network = load_network(folder)
    blind = network.config.model_copy(update={"pixels": None})
    with pytest.raises(InputError, match="knows how they enter"):
        eyes_of(type(network)(network.module, blind, network.example), "it")


def test_a_tower_that_cannot_be_is_refused_by_name(tower_recipe: Path, tmp_path: Path) -> None:
    folder = as_graph(tmp_path / "net", Conv())
    lines = tower_recipe.read_text().splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("image = "))
    for image, said in (
        (f'image = {{ architecture = "graph", folder = "{folder}", node = "conv2d_9" }}', "conv2d_9"),
        ('image = { architecture = "swin" }', "image"),
    ):
        tower_recipe.write_text("\n".join([*lines[:at], image, *lines[at + 1 :]]))
        with pytest.raises((ConfigError, InputError), match=said):
            train(tower_recipe)
    tower_recipe.write_text(
        "\n".join([*lines[:at], f'image = {{ architecture = "graph", folder = "{folder}" }}', *lines[at + 1 :]])
    )
    with pytest.raises(ConfigError, match="takes images of 8 x 8 pixels and 3 channels"):
        train(tower_recipe, ["data.height=16"])


def test_a_damaged_graph_is_refused(sight_recipe: Path, tmp_path: Path) -> None:
    folder = as_graph(tmp_path / "net", Conv())
    with_model(sight_recipe, f'graph = "{folder}"')
    train(sight_recipe, ["steps=1", "evaluation.every=1"])
    path = tmp_path / "out" / "config.json"
    whole = json.loads(path.read_text())
    (tmp_path / "out" / "penjing.json").unlink()
    for change in (
        {"operators": "{}"}, {"hidden_size": -1}, {"tensors": {}}, {"places": 15},
        {"tensors": {"conv.weight": {"dtype": "float32", "shape": [1 << 20, 1 << 20], "trained": True}}},
    ):  # fmt: skip
        damaged = json.loads(json.dumps(whole))
        damaged["penjing"]["vision"] |= change
        path.write_text(json.dumps(damaged))
        with pytest.raises(InputError):
            load_vision_language(tmp_path / "out")


def test_a_projector_of_two_layers_behind_pixel_shuffle_is_kept_in_a_layout_of_our_own(
    sight_recipe: Path, tmp_path: Path
) -> None:
    settings = ["model.projector.kind=mlp", "model.projector.bias=true", "model.scale_factor=2", "steps=1"]
    train(sight_recipe, [*settings, "evaluation.every=1"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "penjing_sight"
    model = load_vision_language(tmp_path / "out")
    assert model.config.rows == 1
    assert isinstance(model.projector, TwoLayers)
    assert answers(tmp_path / "out", tmp_path)
