"""Biases of an encoder that need no addition of their own."""

from __future__ import annotations

import torch

from penjing.core.models.encoder import Encoder, EncoderLayer


@torch.no_grad()
def absorb_biases(model: Encoder) -> None:
    """Set biases of keys, values and down layers of the floating `model` to zero, in place; its function stays.

    A key's bias adds the same to all scores of a query, which softmax ignores. Weights of attention sum to 1, so a
    value's bias comes through unchanged: the output layer adds its product instead. A down layer's is added to what the
    norm before it gives: the norm adds it, and the up layer, which reads that too, takes its product away. (For the
    output layer's that needs the inverse of 1 + W_output W_value, whose condition is up to 6000 in MiniLM.)
    """
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        layer.output.bias.add_(layer.output.weight @ layer.value.bias)
        layer.key.bias.zero_()
        layer.value.bias.zero_()
        layer.attention_norm.bias.add_(layer.down.bias)
        layer.up.bias.sub_(layer.up.weight @ layer.down.bias)
        layer.down.bias.zero_()
