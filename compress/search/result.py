"""What a search found, as search.json has it: every row, the front, and the line to beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penjing.compress.search.base import Changes
from penjing.compress.search.front import Front, best_of, evenly_spread
from penjing.compress.search.predict import Prediction, spearman
from penjing.compress.search.recipe import JointRecipe

SCHEMA = 3
FEWEST = 3  # points, for a correlation of ranks
Kind = Literal["start", "single", "combination", "near the front", "uniform", "front", "second round"]
Choice = tuple[int, ...]


@dataclass
class Row:
    """A combination with its divergence before healing.

    Attributes:
        healed: after it, None if it was not.
        round: in which it was healed.
        foretold: what was predicted of that, from the others of the first round, in the second from all of the first.
    """

    kind: Kind
    choice: Choice
    divergence: float
    healed: float | None = None
    round: Literal[1, 2] | None = None
    foretold: float | None = None


class Measured:
    """Rows that were measured, the network as it is first.

    Args:
        costs: of each. allowed: which costs are within the budget.
    """

    def __init__(
        self,
        search: JointRecipe,
        trials: Changes,
        rows: dict[Choice, Row],
        costs: NDArray[np.float64],
        allowed: Callable[[NDArray[np.float64]], NDArray[np.bool_]],
    ) -> None:
        self.search, self.trials, self.rows, self.costs = search, trials, [*rows.values()], costs
        self.places = {choice: place for place, choice in enumerate(rows)}
        self.measured = np.array([row.divergence for row in self.rows])
        self.healed = np.array([np.nan if row.healed is None else row.healed for row in self.rows], np.float64)
        judged = self.measured if search.heal is None else self.healed
        within = np.flatnonzero(allowed(costs) & ~np.isnan(judged))
        within = within[within > 0]
        best = within[best_of(costs[within], judged[within])]
        if search.heal is None:
            best = best[evenly_spread(costs[best], search.points)]
        self.front = [int(row) for row in best]
        """The rows that become recipes, cheapest first."""

    def said(
        self, prediction: Prediction, front: Front, held_out: Sequence[Choice], uniform: Sequence[Choice]
    ) -> dict[str, Any]:
        """See `run_joint_search`.

        Args:
            front: of the prediction. held_out: rows that it was not fitted to.
        """
        predicted = prediction.of(np.array([row.choice for row in self.rows]))
        apart = np.array([self.places[choice] for choice in held_out])
        return {
            "schema_version": SCHEMA,
            "cost": self.search.cost,
            "whole": float(self.costs[0]),
            "samples": self.trials.count,
            "unit": self.trials.unit,
            "variables": [
                {"name": each.name, "kind": each.kind, "options": list(each.options)}
                for each in self.trials.space.variables
            ],
            "rows": [self._row(place, float(value)) for place, value in enumerate(predicted)],
            "front": [{"row": row, "recipe": f"front-{number:02d}.toml"} for number, row in enumerate(self.front, 1)],
            "prediction": {
                "power": prediction.power,
                "ridge": prediction.ridge,
                "rank": prediction.rank,
                "plain_rank": prediction.plain_rank,
                "measured_rank": spearman(predicted[apart], self.measured[apart]),
                "healed_rank": self._healed_rank(),
                "points": len(front),
                "exact": front.exact,
            },
            "baselines": [self._beside(self.places[each]) for each in uniform],
        }

    def _row(self, place: int, predicted: float) -> dict[str, Any]:
        row, cost = self.rows[place], float(self.costs[place])
        found = {
            "kind": row.kind,
            "choice": list(row.choice),
            "cost": cost,
            "share": cost / float(self.costs[0]),
            "divergence": row.divergence,
            "predicted": predicted,
        }
        return (
            found
            if row.healed is None
            else (found | {"healed": row.healed, "round": row.round, "foretold": row.foretold})
        )

    def _healed_rank(self) -> float | None:
        """The correlation of ranks of healed points with what was foretold of them."""
        pairs = [(row.foretold, row.healed) for row in self.rows if row.foretold is not None]
        if len(pairs) < FEWEST:
            return None
        foretold, healed = np.array(pairs, np.float64).T
        return spearman(foretold, healed)

    def _beside(self, place: int) -> dict[str, int]:
        """A uniform choice, with the row that loses least of those that cost no more, before and after healing."""
        found = {"row": place, "best": self._best(self.measured, place)}
        return found if np.isnan(self.healed[place]) else found | {"healed": self._best(self.healed, place)}

    def _best(self, losses: NDArray[np.float64], place: int) -> int:
        within = np.flatnonzero((self.costs <= self.costs[place] * (1 + 1e-12)) & ~np.isnan(losses))
        return int(min(within, key=lambda each: (losses[each], self.costs[each])))
