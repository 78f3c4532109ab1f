"""Images with texts, for two towers: some calibrate both, others are retrieved by each other before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.graph import drawn_loss
from penjing.core.artifact.towers import IMAGE, TEXT
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.errors import ConfigError
from penjing.core.graph.config import GraphConfig, TensorSpec
from penjing.core.images.normalise import normalise
from penjing.core.progress import Progress, once
from penjing.core.text.text_tokenizer import TextTokenizer, pad
from penjing.core.vision.towers_config import TowersConfig
from penjing.train.chat.held_out import held_out_places
from penjing.train.data.order import permute
from penjing.train.sources.open import built_in
from penjing.train.sources.pairs import open_pairs
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import SourceSettings


@dataclass(frozen=True)
class TowerData:
    """Batches of one tower's inputs, as `Samples`."""

    batches: list[tuple[Tensor, ...]]

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`."""
        yield from self.batches

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`: vectors have no targets, and `drawn_loss` stands in."""
        generator, config = torch.Generator().manual_seed(0), _VECTORS
        for inputs in self.batches:
            yield drawn_loss(model(*inputs), config, generator)


_VECTORS = GraphConfig(
    inputs=(TensorSpec(name="x", dtype="float32", shape=("batch",)),),
    outputs=(TensorSpec(name="output", dtype="float32", shape=("batch", 2)),), meaning="embedding",
)  # fmt: skip


@dataclass(frozen=True)
class PairSamples:
    """Images (N, C, H, W) float32 normalised, and the token ids of each different text.

    Attributes: group: of each image, the place of its text.
    """

    images: Tensor
    texts: list[list[int]]
    group: np.ndarray
    batch: int
    towers: dict[str, TowerData] = field(init=False)

    def __post_init__(self) -> None:
        lengths = defaultdict[int, list[list[int]]](list)
        for row in self.texts:
            lengths[len(row)].append(row)  # what stands at padding would widen ranges
        alike = sorted(lengths.values(), key=len, reverse=True)  # parity looks at the first batch
        tokens = [pad(rows[at : at + self.batch]).tensors() for rows in alike for at in range(0, len(rows), self.batch)]
        images: list[tuple[Tensor, ...]] = [(each,) for each in self.images.split(self.batch)]
        object.__setattr__(self, "towers", {IMAGE: TowerData(images), TEXT: TowerData(tokens)})

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`: an image with its text at a time."""
        for place, text in enumerate(self.group):
            yield (self.images[place : place + 1], *pad([self.texts[text]]).tensors())

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`; each tower has losses of its own."""
        raise ConfigError("two towers are looked at one by one")


def calibration_pairs(folder: Path, settings: DataSettings, progress: Progress) -> PairSamples:
    """The first pairs of the learnt part of the source, mixed: `data.images` at most.

    Raises:
        ConfigError: no source is named.
        InputError: the checkpoint or the source is damaged.
    """
    return pairs_of(folder, settings, settings.held_out, "train", settings.images, settings.batch_images, progress)


def pairs_of(
    folder: Path, settings: SourceSettings, held_out: float, split: str, most: int, batch: int, progress: Progress
) -> PairSamples:
    """At most `most` pairs of a half of the source, for the towers in `folder`; a share of 0 and "test": of all.

    Pairs of one text stay in one half.
    """
    if settings.source is None:
        raise ConfigError("two towers are calibrated and judged by pairs: name them, as data.source = 'pairs.jsonl'")
    config = towers_config(folder)
    source = open_pairs([built_in(settings.source)], settings, settings.text_column)
    texts = list(map(str, source.labels or ()))
    held = held_out_places([each.encode() for each in texts], held_out) if held_out else set(range(source.size))
    chosen = [place for place in range(source.size) if (place in held) is (split == "test") or not held_out]
    order = permute(np.arange(min(most, len(chosen)), dtype=np.uint64), len(chosen), 0)
    places = np.array(chosen)[order.astype(np.int64)]
    names = tuple(sorted(set(texts)))
    spec = TensorSpec(name="images", dtype="float32", shape=("batch", config.channels, *config.image_size))
    reader = Reader(source, places, Form((spec,), config.pixels, len(names), names), settings, once(progress))
    images, classes = reader.images(np.arange(len(reader)))
    kept, group = np.unique(classes, return_inverse=True)
    rows = TextTokenizer(folder, config.text).rows([names[each] for each in kept])
    return PairSamples(_normalised(images, config), rows, group, batch)


def _normalised(images: np.ndarray, config: TowersConfig) -> Tensor:
    mean, std = (np.array(values, np.float32) for values in (config.mean, config.std))
    return torch.from_numpy(np.array(normalise(images.transpose(0, 3, 1, 2), mean, std), order="C"))
