"""Samples of graphs: the user's own, or the example that came with a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError
from penjing.core.graph.config import GraphConfig, graph_config
from penjing.core.graph.network import Network
from penjing.core.progress import Progress, once, plural
from penjing.train.data.order import permute
from penjing.train.sources.open import open_source
from penjing.train.sources.reader import NO_CLASS, Reader, form_of
from penjing.train.sources.settings import SourceSettings

DRAWN = 8  # samples of a loss without labels


@dataclass(frozen=True)
class ExampleData:
    """The inputs that came with a network: what there is where a user gives no data."""

    network: Network

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`: all inputs of the network, in order, once."""
        yield self.network.inputs()

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`; without labels there is no cross-entropy, and `drawn_loss` stands in."""
        generator = torch.Generator().manual_seed(0)
        for inputs in self.inputs():
            yield drawn_loss(model(*inputs), self.network.config, generator)


@dataclass(frozen=True)
class SourceData:
    """The first `count` samples of a reader, mixed, `batch` at a time."""

    reader: Reader
    count: int
    batch: int
    config: GraphConfig

    def labelled(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        """Inputs in the network's order, and classes (B,) int64; `NO_CLASS` where there are none."""
        order = permute(np.arange(self.count, dtype=np.uint64), len(self.reader), 0)
        for begin in range(0, self.count - self.count % self.batch or self.count, self.batch):
            inputs, targets = self.reader.batch(order[begin : begin + self.batch])
            tensors = tuple(torch.from_numpy(inputs[spec.name]) for spec in self.reader.form.inputs)
            yield tensors, torch.from_numpy(targets)

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`."""
        for inputs, _ in self.labelled():
            yield inputs

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`: cross-entropy of the first output where there are classes, else `drawn_loss` of a few samples.

        Few, because each loss is one draw: their squares are what is averaged.
        """
        generator = torch.Generator().manual_seed(0)
        for inputs, targets in self.labelled():
            if not (targets == NO_CLASS).all():
                yield F.cross_entropy(model(*inputs)[0], targets)
                continue
            batched = fixed_batch(self.config) is None
            for part in zip(*(each.split(DRAWN if batched else len(each)) for each in inputs), strict=True):
                yield drawn_loss(model(*part), self.config, generator)


def graph_samples(folder: Path, settings: DataSettings, progress: Progress) -> ExampleData | SourceData:
    """What the graph in `folder` is calibrated with: of the source's learnt half, or its own example.

    Raises:
        InputError: the checkpoint or the source is damaged, or they do not fit.
    """
    if settings.source is None:
        return ExampleData(load_network(folder))
    return source_data(folder, settings, settings.held_out, "train", settings.images, settings.batch_images, progress)


def source_data(
    folder: Path, settings: SourceSettings, held_out: float, split: str, most: int, batch: int, progress: Progress
) -> SourceData:
    """At most `most` samples of a half of a source, for the graph in `folder`; a share of 0 and "test": all."""
    config = graph_config(folder)
    source = open_source(settings)
    indices = source.halves(held_out)[0] if split == "train" else source.judged(held_out)
    reader = Reader(source, indices, form_of(config, folder), settings, once(progress))
    size = fixed_batch(config)
    if size is None:
        return SourceData(reader, min(most, len(reader)), min(batch, len(reader)), config)
    if size > len(reader):
        raise ConfigError(
            f"the network takes {plural(size, 'sample')} at a time, {source.where} has {len(reader)}; give more"
        )
    return SourceData(reader, min(most, len(reader)), size, config)


def fixed_batch(config: GraphConfig) -> int | None:
    """How many samples the network takes at a time, where it takes no other number."""
    first = config.inputs[0].shape
    return first[0] if first and isinstance(first[0], int) else None


def drawn_loss(outputs: tuple[Tensor, ...], config: GraphConfig, generator: torch.Generator) -> Tensor:
    """A loss that needs no labels, and whose squared gradient says how far the answers move.

    Where the first output tells classes apart, the cross-entropy to classes that are drawn from the network's own
    distribution: the mean square of its gradients is Fisher's information, the curvature of the divergence from what
    the network says now (Martens, https://arxiv.org/abs/1412.1193). Else the sum of all floating outputs, each with a
    random sign: the mean square of its gradients is that of the outputs' own.

    The largest class, or half the square of the outputs, would see those changes alone that go along with it.
    """
    first = outputs[0]
    if config.meaning == "classes" and first.dim() == 2 and first.is_floating_point() and first.shape[1] > 1:
        shares = first.detach().float().softmax(1).cpu()
        drawn = torch.multinomial(shares, 1, generator=generator)[:, 0]
        return F.cross_entropy(first, drawn.to(first.device))
    rows = torch.cat([output.flatten() for output in outputs if output.is_floating_point()])
    signs = torch.randint(0, 2, rows.shape, generator=generator) * 2 - 1
    return (rows * signs.to(rows)).sum() / rows.numel() ** 0.5
