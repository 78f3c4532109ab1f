"""Two samples as one: each is mixed with another, which the loss learns by its share (https://arxiv.org/abs/1710.09412)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penjing.train.data.order import mix
from penjing.train.data.stream import Draw, Indexed
from penjing.train.objective.mixture import OTHERS, SHARES
from penjing.train.objective.objective import IGNORED, Batch

_OTHER, _SHARE, _CHANGES = 11, 12, 13  # keys of the numbers that are drawn; augmentation has smaller ones


@dataclass(frozen=True)
class MixedSamples:
    """`samples`, which have "targets" (B,), each mixed with another one where they are learnt from; entries of whole
    numbers stay what they are.

    The other one, its share and how it is augmented follow from a sample's own random number, so that neither the batch
    nor the number of processes changes a mixture.

    Attributes:
        most: the other sample's share is anything from 0 to this.
        by_class: samples without a class are not mixed, since nothing else is learnt. A teacher needs none.
    """

    samples: Indexed
    most: float
    by_class: bool = True

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`; with "others" (B,) int64, the other samples' classes, and "shares" (B,) float32."""
        batch = self.samples.batch(draw)
        if draw.random is None:
            return batch
        places = (mix(draw.random, _OTHER) % np.uint64(len(self.samples))).astype(np.int64)
        other = self.samples.batch(Draw(places, draw.real, mix(draw.random, _CHANGES)))
        drawn = (mix(draw.random, _SHARE) >> np.uint64(11)).astype(np.float64) / 2**53
        shares = torch.from_numpy((self.most * drawn).astype(np.float32))
        if self.by_class:
            shares *= (batch["targets"] != IGNORED) & (other["targets"] != IGNORED)
        joined = {
            name: value.lerp(other[name], shares.to(value.dtype).view(-1, *[1] * (value.dim() - 1)))
            for name, value in batch.items()
            if value.is_floating_point()
        }
        return batch | joined | {OTHERS: other["targets"], SHARES: shares}
