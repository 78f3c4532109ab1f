"""A logistic head on features of texts, its calibration and its area under the ROC curve.

Examples are few (tens to thousands) and features many (hundreds), so the weight of the penalty decides: it is the one
under which held-back examples are most probable, by cross-validation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.manifest import read_json_object
from penjing.curate.learned.facts import ReliabilityRow

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_NEWTON_STEPS, _NEWTON_TOLERANCE = 50, 1e-8
_TINY = 1e-6  # the smallest probability whose logarithm is taken


@dataclass(frozen=True)
class Head:
    """Probabilities sigmoid(((x - mean) / spread) · weights + bias); mean, spread, weights: (features,)."""

    mean: Floats
    spread: Floats
    weights: Floats
    bias: float

    def __call__(self, x_NF: NDArray[np.floating]) -> Floats:
        """(N,) probabilities of (N, features)."""
        return _sigmoid(self.odds(x_NF))

    def odds(self, x_NF: NDArray[np.floating]) -> Floats:
        """(N,) logarithms of odds of (N, features)."""
        return (x_NF - self.mean) / self.spread @ self.weights + self.bias

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(values_of(self)), encoding="utf-8")


def load_head(path: Path) -> Head:
    """What `Head.save` wrote."""
    return head_of(read_json_object(path))


def values_of(head: Head) -> dict[str, Any]:
    """JSON-ready values of `head`."""
    return {
        "mean": head.mean.tolist(), "spread": head.spread.tolist(), "weights": head.weights.tolist(), "bias": head.bias
    }  # fmt: skip


def head_of(values: dict[str, Any]) -> Head:
    """What `values_of` gave."""
    mean, spread, weights = (np.array(values[name]) for name in ("mean", "spread", "weights"))
    return Head(mean, spread, weights, float(values["bias"]))


def fit_head(x_NF: NDArray[np.floating], y_N: Bools, penalty: float) -> Head:
    """The maximum a posteriori of logistic regression with `penalty`/2 · |weights|², by Newton's method.

    Args:
        x_NF: (examples, features), of which each is brought to mean 0 and spread 1 first.
        y_N: (examples,), of both kinds.
    """
    x = np.asarray(x_NF, np.float64)
    mean, spread = x.mean(0), x.std(0)
    spread = np.where(spread > 0, spread, 1.0)
    x = np.concatenate([(x - mean) / spread, np.ones((len(x), 1))], 1)
    ridge = np.full(x.shape[1], penalty)
    ridge[-1] = 1e-9  # the bias is free
    w = np.zeros(x.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(x @ w)
        gradient = x.T @ (p - y_N) + ridge * w
        curvature = (x * np.maximum(p * (1 - p), 1e-9)[:, None]).T @ x
        curvature[np.diag_indices_from(curvature)] += ridge
        step = np.linalg.solve(curvature, gradient)
        w -= step
        if np.abs(step).max() < _NEWTON_TOLERANCE:
            break
    return Head(mean, spread, w[:-1], float(w[-1]))


def learn_head(
    x_NF: NDArray[np.floating], y_N: Bools, groups_N: NDArray[np.integer] | None = None
) -> tuple[Head, Floats]:
    """A head with the penalty of the best cross-validation, and (N,) probabilities of examples by heads that did not
    see them.

    Args:
        groups_N: examples of the same group are held back together; by default each is a group.
    """
    folds = _folds(y_N, groups_N)
    best: tuple[float, float, Floats] | None = None
    for penalty in _PENALTIES:
        held = np.empty(len(y_N))
        for fold in np.unique(folds):
            held[folds == fold] = fit_head(x_NF[folds != fold], y_N[folds != fold], penalty)(x_NF[folds == fold])
        loss = -np.log(np.clip(np.where(y_N, held, 1 - held), _TINY, 1)).mean()
        if best is None or loss < best[0]:
            best = loss, penalty, held
    assert best is not None
    return fit_head(x_NF, y_N, best[1]), best[2]


def _folds(y_N: Bools, groups_N: NDArray[np.integer] | None) -> NDArray[np.integer]:
    """The fold of each example: five, or as many as leave both kinds in each rest; the same in every run."""
    if groups_N is not None:
        order = np.random.default_rng(0).permutation(int(groups_N.max()) + 1)
        return order[groups_N] % 5
    folds = np.empty(len(y_N), np.int64)
    for kind in (False, True):
        places = np.flatnonzero(y_N == kind)
        folds[np.random.default_rng(int(kind)).permutation(places)] = np.arange(len(places)) % 5
    return folds


def area_under_curve(scores_N: NDArray[np.floating], y_N: Bools) -> float:
    """The chance that a positive example scores above a negative one; equal scores count half."""
    _, inverse, counts = np.unique(scores_N, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(y_N.sum())
    return float((ranks[y_N].sum() - positive * (positive + 1) / 2) / (positive * (len(y_N) - positive)))


def reliability(p_N: Floats, y_N: Bools) -> list[ReliabilityRow]:
    """Probabilities beside shares, a row for each tenth that has examples."""
    tenth = np.minimum((p_N * 10).astype(int), 9)
    return [
        ReliabilityRow(
            expected=float(p_N[tenth == place].mean()), found=float(y_N[tenth == place].mean()),
            examples=int((tenth == place).sum()),
        )
        for place in range(10) if (tenth == place).any()
    ]  # fmt: skip


def calibration_error(rows: list[ReliabilityRow]) -> float:
    """Expected calibration error of `reliability`."""
    total = sum(row.examples for row in rows)
    return sum(row.examples * abs(row.expected - row.found) for row in rows) / total


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -40, 40)))
