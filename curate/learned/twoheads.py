"""Two heads on two views of a text, its vector and its surface, whose evidence is added.

One head on both would trust whichever tells apart the noise that it learns from, and be blind to other noise; two that
were learned apart keep each other honest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penjing.core.manifest import read_json_object
from penjing.curate.learned.heads import Bools, Floats, Head, fit_head, head_of, values_of

_VECTOR_PENALTY, _SURFACE_PENALTY = 100.0, 30.0  # weaker ones learn the kinds of noise by heart
_SURFACE_WEIGHT = 2.0  # what 12 numbers say holds for other noise too, rather than what 384 do
_FOLDS = 5


@dataclass(frozen=True)
class Looks:
    """A text as a vector, (features,), and by its surface, (numbers,)."""

    vector: NDArray[np.float32]
    surface: Floats


@dataclass(frozen=True)
class TwoHeads:
    """Probabilities of the sum of what two heads say, mended by a third that maps the sum to shares."""

    vector: Head
    surface: Head
    sum: Head

    def __call__(self, looks: list[Looks]) -> Floats:
        """(looks,) probabilities."""
        return self.sum(self.evidence(looks)[:, None])

    def evidence(self, looks: list[Looks]) -> Floats:
        """(looks,) weighted sums of the heads' logarithms of odds."""
        vectors, surfaces = np.stack([each.vector for each in looks]), np.stack([each.surface for each in looks])
        return self.vector.odds(vectors) + _SURFACE_WEIGHT * self.surface.odds(surfaces)

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        heads = {name: values_of(head) for name, head in vars(self).items()}
        path.write_text(json.dumps(heads), encoding="utf-8")


def load_two_heads(path: Path) -> TwoHeads:
    """What `TwoHeads.save` wrote."""
    return TwoHeads(**{name: head_of(values) for name, values in read_json_object(path).items()})


def fit_two_heads(looks: list[Looks], y_N: Bools) -> TwoHeads:
    """Learn both, and take their sum as it is."""
    vectors, surfaces = np.stack([each.vector for each in looks]), np.stack([each.surface for each in looks])
    same = Head(np.zeros(1), np.ones(1), np.ones(1), 0.0)
    return TwoHeads(fit_head(vectors, y_N, _VECTOR_PENALTY), fit_head(surfaces, y_N, _SURFACE_PENALTY), same)


def learn_two_heads(looks: list[Looks], y_N: Bools, groups_N: NDArray[np.integer]) -> tuple[TwoHeads, Floats]:
    """The heads, and (N,) probabilities of examples by heads that did not see them or others of their group."""
    folds = np.random.default_rng(0).permutation(int(groups_N.max()) + 1)[groups_N] % _FOLDS
    evidence = np.empty(len(y_N))
    for fold in range(_FOLDS):
        heads = fit_two_heads([looks[place] for place in np.flatnonzero(folds != fold)], y_N[folds != fold])
        evidence[folds == fold] = heads.evidence([looks[place] for place in np.flatnonzero(folds == fold)])
    total = fit_head(evidence[:, None], y_N, 1.0)
    both = fit_two_heads(looks, y_N)
    return TwoHeads(both.vector, both.surface, total), total(evidence[:, None])
