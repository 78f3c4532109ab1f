"""Cross-layer equalisation: the channels of each activation are brought to similar ranges before it is quantized.

An activation has one scale for all its channels, so that one wide channel leaves few levels to the others. A positive
factor passes through ReLU, max pooling and addition: what writes a channel is divided by a factor, what reads it is
multiplied. As in https://arxiv.org/abs/1906.04721 (section 4.1) the factor √(a / w) makes the channel's largest
activation a as large as the largest weight w that reads it. Factors are powers of two, so the floating network
computes the same bits as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from penjing.compress.quantize.place_resnet import check_weights, look
from penjing.core.errors import InputError
from penjing.core.models.resnet import Block, ConvNorm, ResNet

LARGEST_EXPONENT = 20  # of a factor: weights stay far from float32's limits
Reader = nn.Conv2d | nn.Linear


@dataclass(frozen=True)
class Link:
    """Channels with one factor each: all norms that write them, all layers that read them."""

    writers: tuple[ConvNorm, ...]
    readers: tuple[Reader, ...]


def links(model: ResNet) -> list[Link]:
    """Every set of channels of a floating ResNet whose factors are free: between two layers of a block, and along the
    blocks from one projection to the next, where additions tie all writers together."""
    found: list[Link] = []
    writers, readers = [model.stem], list[Reader]()
    for block in model.blocks:
        assert isinstance(block, Block)
        layers = [layer for layer in block.layers if isinstance(layer, ConvNorm)]
        found += [Link((one,), (two.conv,)) for one, two in pairwise(layers)]
        readers.append(layers[0].conv)
        if isinstance(block.shortcut, ConvNorm):
            found.append(Link(tuple(writers), (*readers, block.shortcut.conv)))
            writers, readers = [block.shortcut], []
        writers.append(layers[-1])
    found.append(Link(tuple(writers), (*readers, model.fc)))
    return found


@torch.no_grad()
def equalize(model: ResNet, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Equalise `model`, floating and in evaluation mode, in place; its outputs stay as they are, bit by bit.

    Args:
        batches: arguments of the model, on which the channels' ranges are seen.

    Raises:
        InputError: a weight or an activation holds NaN or infinity, or the data do not fit.
    """
    check_weights(model)
    found = links(model)
    ranges: dict[Reader, Tensor] = {}

    def watch(reader: Reader) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            largest = arguments[0].abs().transpose(0, 1).flatten(1).amax(1)
            ranges[reader] = torch.maximum(ranges[reader], largest) if reader in ranges else largest

        return hook

    with ExitStack() as stack:
        for link in found:
            for reader in link.readers:
                stack.callback(reader.register_forward_pre_hook(watch(reader)).remove)
        look(model, batches)
    for link in found:
        activation = torch.stack([ranges[reader] for reader in link.readers]).amax(0)
        if not bool(activation.isfinite().all()):
            raise InputError(
                "equalize: an activation holds NaN or infinity; check the checkpoint (does it classify?) and the "
                "calibration data"
            )
        weight = torch.stack([_columns(reader).abs().amax((1, 3)).flatten() for reader in link.readers]).amax(0)
        factor = _powers(activation, weight)
        for writer in link.writers:
            writer.norm.weight.div_(factor)
            writer.norm.bias.div_(factor)
        for reader in link.readers:
            columns = _columns(reader)
            columns.mul_(factor.view(columns.shape[0], 1, columns.shape[2], 1))


def _columns(reader: Reader) -> Tensor:
    """A view (groups, outputs of a group, inputs of a group, kernel) of the weight."""
    groups = reader.groups if isinstance(reader, nn.Conv2d) else 1
    weight = reader.weight
    return weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)


def _powers(activation: Tensor, weight: Tensor) -> Tensor:
    """2^k next to √(activation / weight); 1 for channels that are dead or that nobody reads."""
    alive = (activation > 0) & (weight > 0)
    exponent = 0.5 * (activation.clamp(min=1e-30).log2() - weight.clamp(min=1e-30).log2())
    return torch.where(alive, exponent.round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT), 0.0).exp2()
