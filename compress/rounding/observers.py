"""Observers watch an activation over calibration batches and choose the range that its quantizer will cover.

What an observer has seen is a histogram over [−limit, limit], limit a power of two: when a larger value comes, limit
doubles and bins merge in pairs, so that no batch is kept and none is seen twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from penjing.compress.rounding.formats import NumberFormat
from penjing.core.errors import InputError

BINS = 8192  # over [−limit, limit]: at least 2048 over the largest value seen, 8 for each of 256 levels
CANDIDATES = 90  # shrunken ranges that are tried, from 1 down to SMALLEST_SHARE of the observed one
SMALLEST_SHARE = 0.1
Method = Literal["minmax", "percentile", "mse", "entropy"]


class Observer:
    """Everything that was seen of one activation.

    Args:
        name: of the activation, for errors.
        method: "minmax": all that was seen; "percentile": without the `percentile` of outliers; "mse": the range with
            the least squared error; "entropy": the range that keeps most of the distribution's information (the
            least Kullback-Leibler divergence between the values and their quantized form).
        percentile: share of values inside the range, of each sign's side.
    """

    def __init__(self, name: str, method: Method = "minmax", percentile: float = 0.9999) -> None:
        self.name, self.method, self.percentile = name, method, percentile
        self.lowest, self.highest = 0.0, 0.0  # zero is always inside: it must be stored exactly
        self.num_values = 0
        self._zeros = 0.0  # exact zeros, which every format stores exactly
        self._counts = torch.zeros(BINS, dtype=torch.float64)
        self._limit = 2.0**-20

    def observe(self, x: Tensor) -> None:
        """Add the values of a batch, of any shape.

        Raises:
            InputError: NaN or infinity.
        """
        if x.numel() == 0:
            raise InputError(f"calibration: the activation {self.name} is empty; check the shape of the data")
        low, high = (float(value) for value in x.detach().aminmax())
        if not (low > -torch.inf and high < torch.inf):  # NaN fails both
            raise InputError(
                f"calibration: the activation {self.name} holds NaN or infinity; "
                "check the checkpoint (does it classify?) and the calibration data"
            )
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        self.num_values += x.numel()
        if self.method == "minmax":
            return
        while self._limit < max(-low, high):
            self._double()
        flat = x.detach().flatten().to(torch.float32)
        self._zeros += float((flat == 0).sum())
        flat = flat[flat != 0]
        bins = ((flat / self._limit + 1) * (BINS / 2)).to(torch.int64).clamp_(0, BINS - 1)
        self._counts += torch.bincount(bins, minlength=BINS).to(torch.float64)

    def range(self, number_format: NumberFormat) -> tuple[float, float]:
        """(lowest, highest) to be covered, lowest ≤ 0 ≤ highest; (0, 0) if there were zeros alone.

        Raises:
            InputError: nothing was observed.
        """
        if self.num_values == 0:
            raise InputError(f"calibration: no value of the activation {self.name} was seen; give calibration data")
        if self.method == "minmax" or self.lowest == self.highest == 0.0:
            return self.lowest, self.highest
        if self.method == "percentile":
            return self._percentiles()
        score = self._squared_error if self.method == "mse" else self._divergence
        return self._best(number_format, score)

    def _double(self) -> None:
        merged = self._counts.view(-1, 2).sum(1)
        self._counts = torch.zeros_like(self._counts)
        self._counts[BINS // 4 : 3 * BINS // 4] = merged
        self._limit *= 2

    def _centres(self) -> Tensor:
        return ((torch.arange(BINS, dtype=torch.float64) + 0.5) * (2 / BINS) - 1) * self._limit

    def _percentiles(self) -> tuple[float, float]:
        outside = (1 - self.percentile) * (self._counts.sum() + self._zeros)
        edges = torch.linspace(-self._limit, self._limit, BINS + 1, dtype=torch.float64)
        above = self._counts.flip(0).cumsum(0).flip(0)  # in this bin or a higher one
        below = self._counts.cumsum(0)
        high = edges[1:][above > outside]
        low = edges[:-1][below > outside]
        top = min(self.highest, float(high.max())) if len(high) else 0.0
        bottom = max(self.lowest, float(low.min())) if len(low) else 0.0
        return min(bottom, 0.0), max(top, 0.0)

    def _best(self, number_format: NumberFormat, score: Callable[[Tensor], float]) -> tuple[float, float]:
        """The range with the least score of the bins' centres as `number_format` rounds them."""
        centres = self._centres()
        best, chosen = float("inf"), (self.lowest, self.highest)
        for share in torch.linspace(1.0, SMALLEST_SHARE, CANDIDATES).tolist():
            low, high = self.lowest * share, self.highest * share
            scale, zero = number_format.parameters(torch.tensor(low), torch.tensor(high))
            rounded = (number_format.store(centres / scale, zero) - zero) * scale
            if (value := score(rounded)) < best:
                best, chosen = value, (low, high)
        return chosen

    def _squared_error(self, rounded: Tensor) -> float:
        return float((self._counts * (self._centres() - rounded).square()).sum())

    def _divergence(self, rounded: Tensor) -> float:
        """KL(P ‖ Q): P the histogram, whatever is clipped counted in the outermost bin that is kept; Q what rounding
        leaves of the kept bins: each level's count spread evenly over its bins that are not empty."""
        _, level = rounded.unique(return_inverse=True)
        centres, num_levels = self._centres(), int(level.max()) + 1
        clipped_high = (level == num_levels - 1) & (centres > rounded)
        clipped_low = (level == 0) & (centres < rounded)
        kept = self._counts.clone()
        kept[clipped_high | clipped_low] = 0.0
        original = kept.clone()
        inside = (~(clipped_high | clipped_low)).nonzero().flatten()
        if len(inside) == 0:
            return float("inf")
        original[inside[-1]] += self._counts[clipped_high].sum()
        original[inside[0]] += self._counts[clipped_low].sum()
        filled = (kept > 0).to(torch.float64)
        mass = torch.zeros(num_levels, dtype=torch.float64).index_add_(0, level, kept)
        places = torch.zeros(num_levels, dtype=torch.float64).index_add_(0, level, filled)
        spread = torch.where(kept > 0, (mass / places.clamp(min=1))[level], torch.zeros_like(kept))
        if float(spread.sum()) == 0:
            return float("inf")
        p, q = original / original.sum(), spread / spread.sum()
        used = p > 0
        return float((p[used] * (p[used] / q[used].clamp(min=1e-10)).log()).sum())
