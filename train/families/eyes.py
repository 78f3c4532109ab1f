"""What a recipe lets networks see with: any network of images as an encoder or a tower, with its first weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import InputError
from penjing.core.family import FAMILIES, family_of
from penjing.core.graph.config import Pixels
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from penjing.core.images.tiles import Look
from penjing.core.models.resnet import ResNet
from penjing.core.vision.graph_eyes import GraphEyes, GraphEyesConfig, colours_of, eyes_of
from penjing.core.vision.vit import ViTConfig
from penjing.train.families.classifier import initialize_resnet, resnet_config
from penjing.train.recipe.model import VisionLanguageModel

_HALF = 0.5
_NEW = "the new ResNet"


def encoder_of(
    model: VisionLanguageModel, seed: int
) -> tuple[ViTConfig | GraphEyesConfig, Look, dict[str, Tensor] | None]:
    """The encoder of a decoder that sees, how it is shown images, and the weights that it begins with.

    Raises:
        InputError: a folder that is missing, damaged, or whose network takes no images.
        ConfigError: a ResNet that there is not.
    """
    if model.vision is not None:
        return model.vision, Look(), None
    if model.graph is not None:
        network = image_network(model.graph)
        eyes = eyes_of(network, str(model.graph), model.node)
        pixels = network.config.pixels
        assert pixels is not None, "looked at by eyes_of"
        mean, std = colours_of(pixels)
        look = Look(mean=mean, std=std, fit=pixels.fit, resize=pixels.resize, filter=pixels.filter)
        return eyes.config, look, eyes.state_dict()
    assert model.resnet is not None, "the recipe is checked"
    channels = 3 if model.sound is None else 1
    torch.manual_seed(seed)
    made = ResNet(resnet_config(model.resnet, 1, channels))
    initialize_resnet(made)
    size = model.resnet_size
    pixels = _pixels(size, size, (_HALF,) * channels, (_HALF,) * channels)
    eyes = eyes_of(_traced(made, pixels), _NEW, keeps_norms=False)
    return eyes.config, Look(), eyes.state_dict()


def tower_of(folder: Path, node: str | None) -> tuple[GraphEyes, Pixels]:
    """The network in `folder` as an image tower, and how images enter it.

    Raises:
        InputError: it is missing, damaged, or takes no images.
    """
    network = image_network(folder)
    eyes = eyes_of(network, str(folder), node, pooled=True)
    assert network.config.pixels is not None, "looked at by eyes_of"
    return eyes, network.config.pixels


def image_network(folder: Path) -> Network:
    """A network of images as a graph: what `penjing import` made of any, or a classifier's checkpoint.

    Raises:
        InputError: of another family, missing or damaged.
    """
    family = family_of(folder)
    if family == "graph":
        return load_network(folder)
    if family == "classifier":
        model, config = load_classifier(folder)
        seen = config.pixels()
        given = _pixels(*config.image_size, config.mean, config.std)
        return _traced(model, given.model_copy(update={"fit": seen.fit, "resize": seen.resize, "filter": seen.filter}))
    raise InputError(
        f"{folder} holds {FAMILIES.get(family, family)}; an encoder is a graph that 'penjing import' made, or "
        "an image classifier"
    )


def _pixels(height: int, width: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Pixels:
    return Pixels(height=height, width=width, mean=mean, std=std, order="L" if len(mean) == 1 else "RGB")


def _traced(model: ResNet, pixels: Pixels) -> Network:
    images = torch.zeros(2, len(pixels.mean), pixels.height, pixels.width)
    return from_torch(
        model.eval(), keyword={"images": images}, dynamic={"images": {0: "batch"}}, pixels=pixels, meaning="classes"
    )
