"""The best evaluation of a run so far: its weights on disk, and when there has been no better one for too long."""

from __future__ import annotations

import math
from typing import Any

from penjing.core.errors import ConfigError
from penjing.train.state.checkpoint import Checkpoints


class Best:
    """Judges evaluations by `metric`.

    Args:
        goal: "lowest" or "highest": which values of the metric are better.
        patience: evaluations in a row without a better one after which the run is over; 0: never.
        checkpoints: where the best weights are kept; None keeps none.

    Attributes: step, results: of the best evaluation; 0 and empty before the first.
    """

    def __init__(self, metric: str, goal: str, patience: int, checkpoints: Checkpoints | None) -> None:
        self.metric, self.goal, self.patience = metric, goal, patience
        self.checkpoints = checkpoints
        self.step = 0
        self.results: dict[str, float] = {}
        self._worse = 0

    @property
    def is_over(self) -> bool:
        """Whether patience has run out."""
        return 0 < self.patience <= self._worse

    def judge(self, step: int, results: dict[str, float]) -> bool:
        """Take an evaluation; True when it is the best so far. NaN never is, nor one without the metric, if there was a
        better one: of some answers a metric may count nothing.

        Raises:
            ConfigError: it does not measure the metric, and none did before.
        """
        if self.metric not in results and not self.results:
            raise ConfigError(
                f"evaluation.metric = {self.metric!r} is not measured; an evaluation has {', '.join(results)}"
            )
        sign = 1.0 if self.goal == "lowest" else -1.0
        value = sign * results.get(self.metric, math.nan)
        better = value < sign * self.results[self.metric] if self.results else not math.isnan(value)
        if better:
            self.step, self.results, self._worse = step, dict(results), 0
        else:
            self._worse += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint, once the weights that they speak of are on disk.

        Raises:
            SetupError: those could not be written.
        """
        if self.checkpoints is not None:
            self.checkpoints.wait()
        return {"step": self.step, "results": self.results, "worse": self._worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`. Of an evaluation whose weights are not there, since none were kept then or better ones
        replaced them, nothing is known any more: the next one is the best."""
        self.step, self.results, self._worse = int(state["step"]), dict(state["results"]), int(state["worse"])
        if self.checkpoints is not None and not self.checkpoints.path(self.step).exists():
            self.step, self.results = 0, {}
