"""penjing's own networks as graphs: what is quantized and exported of them is what is of any other."""

from __future__ import annotations

import torch

from penjing.core.artifact.onnx_encoder import IDS, MASK
from penjing.core.artifact.onnx_encoder import OUTPUT as EMBEDDING
from penjing.core.graph.config import GraphConfig, TensorSpec
from penjing.core.graph.network import Network, set_tensor, tensor_at
from penjing.core.graph.trace import from_torch
from penjing.core.models.encoder import Encoder
from penjing.core.models.resnet import ResNet
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT
from penjing.core.vision.towers import ImageTower, TextTower, TwoTowers

_SEQUENCE = {0: "batch", 1: "sequence"}


def encoder_network(model: Encoder) -> Network:
    """A text encoder: "input_ids" and "attention_mask" (batch, sequence) int64 → "embedding" (batch, hidden) float32.

    Weights are shared with `model`, not copied.
    """
    ids = torch.arange(6).view(2, 3) % model.config.vocab_size
    mask = torch.ones_like(ids)
    traced = from_torch(model.eval(), (ids, mask), dynamic={"tokens_BT": _SEQUENCE, "mask_BT": _SEQUENCE})
    shape = tuple(_SEQUENCE.values())
    config = GraphConfig(
        inputs=tuple(TensorSpec(name=name, dtype="int64", shape=shape) for name in (IDS, MASK)),
        outputs=(TensorSpec(name=EMBEDDING, dtype="float32", shape=(shape[0], model.config.hidden_size)),),
        meaning="embedding",
    )
    return Network(traced.module, config, {IDS: ids, MASK: mask})


def tower_networks(towers: TwoTowers) -> dict[str, Network]:
    """Both towers by name: "image" takes normalised images, "text" "input_ids" and "attention_mask" (batch, sequence)
    int64; each gives vectors (batch, numbers) float32 of length 1. Weights are shared, not copied.

    Raises:
        InputError: a tower computes what no graph can say.
    """
    config = towers.config
    images = torch.randn(2, config.channels, *config.image_size, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(6).view(2, 3) % config.text.vocab_size
    image = from_torch(
        ImageTower(towers).eval(), keyword={"images": images}, dynamic={"images": {0: "batch"}}, meaning="embedding",
        pixels=config.pixels,
    )  # fmt: skip
    text = from_torch(
        TextTower(towers).eval(), keyword={IDS: ids, MASK: torch.ones_like(ids)},
        dynamic={IDS: _SEQUENCE, MASK: _SEQUENCE}, meaning="embedding",
    )  # fmt: skip
    return {"image": image, "text": text}


def classifier_network(model: ResNet, image_size: tuple[int, int]) -> Network:
    """An image classifier: "images" (batch, channels, *image_size) float32, normalised → "logits" (batch, classes).

    Weights are shared with `model`, not copied. A convolution is called as what it shares with its norm: "stem".
    """
    images = torch.zeros(2, model.config.in_channels, *image_size)
    traced = from_torch(model.eval(), (images,), meaning="classes")
    module = traced.module
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name.endswith(".conv.weight"):
            node.target = f"{name.removesuffix('.conv.weight')}.weight"
            set_tensor(module, node.target, tensor_at(module, name))
            delattr(module.get_submodule(name.removesuffix(".weight")), "weight")
    module.recompile()
    config = traced.config
    inputs = (config.inputs[0].model_copy(update={"name": INPUT}),)
    outputs = (config.outputs[0].model_copy(update={"name": OUTPUT}),)
    return Network(module, config.model_copy(update={"inputs": inputs, "outputs": outputs}), {INPUT: images})
