"""penjing's own networks as graphs: what is quantized and exported of them is what is of any other."""

from __future__ import annotations

import torch

from penjing.core.artifact.onnx_encoder import IDS, MASK, OUTPUT
from penjing.core.graph.config import GraphConfig, TensorSpec
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from penjing.core.models.encoder import Encoder

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
        outputs=(TensorSpec(name=OUTPUT, dtype="float32", shape=(shape[0], model.config.hidden_size)),),
        meaning="embedding",
    )
    return Network(traced.module, config, {IDS: ids, MASK: mask})
