"""Seconds of each decoder layer on this machine, for planning what runs here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from penjing.core.models.attention import causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import DecoderLayer
from penjing.core.models.rope import inverse_frequencies, layer_angles
from penjing.core.progress import Progress, Silent
from penjing.kernels.cross_entropy import linear_cross_entropy
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.processes.devices import synchronize

_RUNS = 3


def measure_layers(
    config: DecoderConfig,
    length: int,
    samples: int,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(forward, backward) seconds of every layer on `samples` sequences of `length` tokens in float32 on `device`
    (the processor), the head added to the last. Layers of one shape are measured once; of three runs the fastest
    counts."""
    device = device or torch.device("cpu")
    progress = progress or Silent()
    shapes = decoder_shape(config).layers
    kinds = {shape: index for index, shape in reversed(list(enumerate(map(repr, shapes))))}
    progress.start("measuring layers", len(kinds) + 1)
    positions = torch.arange(length, device=device)
    angles = layer_angles(config, inverse_frequencies(config).to(device), positions)
    attend = causal_attention(config)
    x = torch.randn(samples, length, config.hidden_size, device=device, requires_grad=True)
    measured = {}
    for kind, index in kinds.items():
        layer = DecoderLayer(config, index).to(device)
        measured[kind] = _seconds(lambda layer=layer, index=index: layer(x, *angles(index), attend).sum(), device)
        progress.advance()
    weight = torch.randn(config.vocab_size, config.hidden_size, device=device, requires_grad=True)
    targets = torch.zeros(samples * length, dtype=torch.long, device=device)
    head = _seconds(lambda: linear_cross_entropy(x.flatten(0, 1), weight, targets), device)
    progress.advance()
    forward, backward = zip(*(measured[repr(shape)] for shape in shapes), strict=True)
    return (*forward[:-1], forward[-1] + head[0]), (*backward[:-1], backward[-1] + head[1])


def _seconds(work: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    forward, backward = [], []
    for _ in range(_RUNS):
        began = _now(device)
        loss = work()
        middle = _now(device)
        loss.backward()
        forward.append(middle - began)
        backward.append(_now(device) - middle)
    return min(forward), min(backward)


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()
