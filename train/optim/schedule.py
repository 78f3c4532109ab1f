"""The learning rate as a pure function of the step: nothing to save, nothing to lose on resume."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config


class LearningRate(Config):
    """Linear warm-up to `peak`, then `kind`.

    WSD: Hu et al., https://arxiv.org/abs/2404.06395; cosine: https://arxiv.org/abs/1608.03983.
    """

    kind: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine",
        description='After the warm-up: "cosine" decay, "wsd" (stable, then linear decay) or "constant".',
    )
    peak: float = Field(default=1e-3, gt=0, description="The largest learning rate.")
    warmup: float = Field(
        default=0.02, ge=0, lt=1, description="Share of the steps in which the rate rises to its peak."
    )
    decay: float = Field(default=0.2, gt=0, le=1, description='The last share of the steps, in which "wsd" decays.')
    floor: float = Field(default=0.1, ge=0, le=1, description="The last rate, as a share of the peak.")

    @model_validator(mode="after")
    def _fits(self) -> LearningRate:
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"warmup={self.warmup} and decay={self.decay} are more than the whole run; lower one")
        return self

    def at(self, step: int, steps: int) -> float:
        """The rate of update `step` (0 … steps - 1)."""
        warmup_steps = math.ceil(self.warmup * steps)
        if step < warmup_steps:
            return self.peak * (step + 1) / warmup_steps
        low = self.floor * self.peak
        if self.kind == "cosine":
            done = (step - warmup_steps) / max(steps - 1 - warmup_steps, 1)
            return low + (self.peak - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        decay_steps = math.ceil(self.decay * steps)
        if self.kind == "wsd" and step >= steps - decay_steps:
            left = (steps - 1 - step) / decay_steps
            return low + (self.peak - low) * max(left, 0.0)
        return self.peak
