"""Points that are made and healed, and what healing forgives of each kind of change.

A search judges networks that nobody trained. Training gives back much of what a narrower network lost and little of
what rounding costs, so that the best combinations after it are others. With h the divergence of a healed network and
X_k what the fitted sum says of its changes of kind k (widths, bits, layers, windows),

    h^p  ≈  Σ_k f_k X_k

whose factors are pulled to a common one, for the points are few. The front of this sum is where a second round looks.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.compress.plan import plan
from penjing.compress.preflight import check_fit
from penjing.compress.recipe import load_recipe
from penjing.compress.search.base import Changes
from penjing.compress.search.points import HEALING
from penjing.compress.search.predict import Prediction
from penjing.compress.search.recipe import Heal
from penjing.compress.steps.base import Context
from penjing.core.config import key_of
from penjing.core.errors import ConfigError
from penjing.core.files import publish_folder
from penjing.core.work import Places, Tasks

RIDGE = 0.02  # how strongly factors are pulled to a common one
LEAST = 0.01  # of the common factor: nothing is forgiven whole
SMALLEST = 1e-9  # a divergence below it counts as this one


class Healer:
    """Makes combinations, trains them as the base says, and judges what came out.

    Args:
        values: of the base recipe.
        context: of the base recipe's model. hashes: of its `input_hashes`.

    Raises:
        ConfigError: the base has no step that trains, or such a step does not fit the model.
    """

    def __init__(
        self,
        heal: Heal,
        trials: Changes,
        values: dict[str, Any],
        context: Context,
        hashes: dict[str, dict[str, str]],
    ) -> None:
        steps = [dict(step) for step in values["steps"]]
        taught = [step for step in steps if step["kind"] in HEALING]
        if not taught:
            raise ConfigError(
                "[heal] trains points as base's steps do, and base has none of kind 'distill' or 'finetune'; add one, "
                "or leave [heal] out"
            )
        for step in taught if heal.steps is not None else []:
            step["steps"] = heal.steps
        self.trials, self.values, self.progress = trials, values | {"steps": steps}, context.progress
        self.context, self.hashes = context, hashes
        self.trained = [step.get("steps") for step in taught]
        check_fit(load_recipe(self.values), self.context)

    def changes(self, choice: Sequence[int]) -> bool:
        """Whether there is anything to train in the network of a combination: where bits alone change there is not."""
        return any(step["kind"] in HEALING for step in self.trials.point(self.values, choice))

    def name(self, choice: Sequence[int]) -> str:
        """Of the task whose result is the divergence."""
        return f"healed_{key_of(list(choice), self._steps(choice), self.hashes)[:20]}"

    def divergence(self, choice: Sequence[int], tasks: Tasks) -> float:
        """How far a healed network is from the network as it is; what `tasks` keeps is not made again.

        A run that is killed goes on after the last step that is complete, and inside one that trains after its last
        checkpoint.
        """
        name = self.name(choice)
        folder = tasks.path / name

        def measure() -> dict[str, Any]:
            made = self._made(choice, folder)
            (folder / "judged").mkdir(exist_ok=True)
            own = Tasks(folder / "judged", tasks.baseline)
            return {"divergence": self.trials.healed(made, choice, own, self.progress)}

        found = tasks.run(name, measure).result
        shutil.rmtree(folder, ignore_errors=True)
        return float(found["divergence"])

    def _steps(self, choice: Sequence[int]) -> list[dict[str, Any]]:
        return [step for step in self.trials.point(self.values, choice) if step["kind"] != "quantize"]

    def _made(self, choice: Sequence[int], folder: Path) -> Path:
        recipe = load_recipe(self.values | {"steps": self._steps(choice), "output": str(folder / "out")})
        source = recipe.model
        for planned in plan(recipe.steps):
            made, scratch = folder / planned.name, folder / f"{planned.name}.scratch"
            if not made.exists():
                scratch.mkdir(parents=True, exist_ok=True)
                with publish_folder(made, replace=True) as partial:
                    planned.step.run(Places(source, partial, scratch), self.context)
                shutil.rmtree(scratch)
            source = made
        return source


@dataclass(frozen=True)
class Recovery:
    """What healing leaves of each kind of change: `factors`, by kind, of what the sum before healing says."""

    kinds: tuple[str, ...]
    factors: dict[str, float]

    def applied(self, prediction: Prediction) -> Prediction:
        """The prediction after healing."""
        return prediction.scaled([self.factors[kind] for kind in self.kinds])


def fit_recovery(
    prediction: Prediction, kinds: Sequence[str], choices: NDArray[np.integer], healed: NDArray[np.float64]
) -> Recovery:
    """Fit the factors to healed combinations.

    Args:
        kinds: of each variable. choices: (N, variables), none the network as it is. healed: (N,) divergences.
    """
    names = list(dict.fromkeys(kinds))
    target = np.maximum(healed, SMALLEST) ** prediction.power
    parts = np.stack([prediction.scaled([float(kind == name) for kind in kinds]).total(choices) for name in names], 1)
    relative = np.maximum(parts, 0) / target[:, None]
    whole = relative.sum(1)
    scale = float((whole**2).sum())
    common = float(whole.sum()) / scale if scale else 1.0
    relative *= common
    left = relative.T @ relative + RIDGE * len(target) * np.eye(len(names))
    apart = np.linalg.solve(left, relative.T @ (1 - relative.sum(1)))
    factors = common * np.maximum(1 + apart, LEAST)
    return Recovery(tuple(kinds), dict(zip(names, map(float, factors), strict=True)))


def left_out(
    prediction: Prediction, kinds: Sequence[str], choices: NDArray[np.integer], healed: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(N,) what the others foretell of each healed combination; NaN where there is one alone."""
    if len(choices) < 2:
        return np.full(len(choices), np.nan)
    found = np.empty(len(choices))
    for place in range(len(choices)):
        others = np.arange(len(choices)) != place
        recovery = fit_recovery(prediction, kinds, choices[others], healed[others])
        found[place] = recovery.applied(prediction).of(choices[[place]])[0]
    return found
