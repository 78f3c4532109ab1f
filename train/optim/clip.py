"""The norm of the gradient over a run: its log-normal fit, outliers, and clipping by a fixed or adaptive limit.

Gradient norms of a healthy run are close to log-normal; the fit is an exponential moving mean and variance of the
logarithm.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from penjing.core.config import Config


class ClipConfig(Config):
    """The largest gradient that passes unchanged: a fixed norm, and one that follows the run."""

    norm: float | None = Field(default=1.0, gt=0, description="The gradient is clipped to this norm.")
    adaptive: bool = Field(
        default=False, description="The gradient is also clipped to the running mean of norms + deviations."
    )
    deviations: float = Field(
        default=3.0, gt=0, description="Standard deviations above the mean at which a norm is an outlier."
    )
    memory: float = Field(
        default=0.98, gt=0, lt=1, description="Weight of the past in the running fit; 0.98 remembers about 50 steps."
    )


class GradientNorms:
    """The running fit of a run's gradient norms and the limit that follows from it."""

    warm_up = 20  # steps before the fit is believed

    def __init__(self, config: ClipConfig) -> None:
        self.config = config
        self.num_seen = 0
        self.num_outliers = 0
        self.log_mean = 0.0
        self._log_variance = 0.0

    @property
    def log_deviation(self) -> float:
        """Standard deviation of the logarithm of the norm."""
        return math.sqrt(self._log_variance)

    def limit(self) -> float:
        """The largest norm that passes unclipped now; infinite without any limit."""
        limit = self.config.norm or math.inf
        if self.config.adaptive and self.num_seen >= self.warm_up:
            limit = min(limit, math.exp(self.log_mean + self.config.deviations * self.log_deviation))
        return limit

    def observe(self, norm: float) -> bool:
        """Add the norm of one step, finite and ≥ 0; True when it is an outlier of the fit so far.

        An outlier enters the fit as the value at the edge, so that one spike does not raise the limit for the next.
        """
        if norm <= 0:
            return False
        log_norm = math.log(norm)
        edge = self.log_mean + self.config.deviations * max(self.log_deviation, 1e-3)
        outlier = self.num_seen >= self.warm_up and log_norm > edge
        if outlier:
            self.num_outliers += 1
            log_norm = edge
        # The first steps are weighted equally, as in an ordinary mean.
        weight = max(1.0 - self.config.memory, 1.0 / (self.num_seen + 1))
        delta = log_norm - self.log_mean
        self.log_mean += weight * delta
        self._log_variance = (1.0 - weight) * (self._log_variance + weight * delta * delta)
        self.num_seen += 1
        return outlier

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "num_seen": self.num_seen,
            "num_outliers": self.num_outliers,
            "log_mean": self.log_mean,
            "log_variance": self._log_variance,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.num_seen, self.num_outliers = int(state["num_seen"]), int(state["num_outliers"])
        self.log_mean, self._log_variance = float(state["log_mean"]), float(state["log_variance"])
