"""Dynamic loss scaling (Micikevicius et al., https://arxiv.org/abs/1710.03740): keeps float16 gradients above
underflow.

The scale doubles after a window of steps without overflow and halves when a gradient overflows; such a step is skipped.
"""

from __future__ import annotations

import math
from typing import Any

SMALLEST, LARGEST = 2.0**-14, 2.0**24  # below: nothing left to save; above: float32 sums of squares lose headroom


def initial_scale(num_parameters: int) -> float:
    """The power of two at which gradients of unit norm, spread evenly over the parameters, have a root mean square
    near 2^2.5.

    That is 2^16 (the usual constant) at 135 million parameters, 2^12 at one million: small models have larger
    gradient elements, and would begin with a row of overflows.
    """
    return 2.0 ** min(max(round(math.log2(max(num_parameters, 1)) / 2 + 2.5), 8), 20)


class LossScale:
    """The factor on the loss; constant 1 when not `enabled` (float32 and bfloat16 have the range)."""

    def __init__(self, initial: float = 65536.0, window: int = 2000, enabled: bool = True) -> None:
        self.enabled = enabled
        self.window = window
        self._scale = initial
        self._good_steps = 0
        self.num_changes = 0

    @property
    def value(self) -> float:
        """What the loss is multiplied by now."""
        return self._scale if self.enabled else 1.0

    @property
    def exhausted(self) -> bool:
        """True when the scale cannot fall further: the overflow does not come from the scale."""
        return self.enabled and self._scale <= SMALLEST

    def update(self, overflow: bool) -> None:
        """Take note of one step; `overflow` must be the same in every process."""
        if not self.enabled:
            return
        before = self._scale
        if overflow:
            self._scale, self._good_steps = max(self._scale * 0.5, SMALLEST), 0
        else:
            self._good_steps += 1
            if self._good_steps >= self.window:  # beyond it where a run goes on with a shorter one
                self._scale, self._good_steps = min(self._scale * 2.0, LARGEST), 0
        self.num_changes += self._scale != before

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"scale": self._scale, "good_steps": self._good_steps, "num_changes": self.num_changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self._scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
        self.num_changes = int(state["num_changes"])
