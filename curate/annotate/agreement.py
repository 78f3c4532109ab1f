"""What several judges who err in ways of their own together say (Dawid and Skene, 1979, Applied Statistics 28.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS, _STILL = 100, 1e-12  # of expectation and maximization, and the change of probabilities that ends them
_SMALLEST = 1e-10  # probability: an answer that a judge never gave is not impossible


@dataclass(frozen=True)
class Agreement:
    """What the answers come to.

    Attributes:
        label: (tasks, labels) float64, the probability of each label for each task.
        error: (judges, labels, labels) float64: how often a judge gives the second where the first is right.
        share: (labels,) float64, how common each label is.
    """

    label: NDArray[np.float64]
    error: NDArray[np.float64]
    share: NDArray[np.float64]

    @property
    def skill(self) -> NDArray[np.float64]:
        """(judges,) how often a judge is right, over labels as common as they are."""
        return np.einsum("jkk,k->j", self.error, self.share)


def dawid_skene(answers: Sequence[tuple[int, int, int]], tasks: int, judges: int, labels: int) -> Agreement:
    """Labels and the judges' errors, by expectation and maximization from the shares of votes.

    Args:
        answers: (task, judge, label), places from 0; each task has one and more.
    """
    task_A, judge_A, given_A = (np.array(column, np.int64) for column in zip(*answers, strict=True))
    label_TK = np.zeros((tasks, labels))
    np.add.at(label_TK, (task_A, given_A), 1.0)
    label_TK /= label_TK.sum(1, keepdims=True)
    share_K, error_JKK = _learned(label_TK, task_A, judge_A, given_A, judges)
    for _ in range(_ROUNDS):
        log_TK = np.tile(np.log(np.maximum(share_K, _SMALLEST)), (tasks, 1))
        np.add.at(log_TK, task_A, np.log(error_JKK[judge_A, :, given_A]))
        before_TK, label_TK = label_TK, np.exp(log_TK - log_TK.max(1, keepdims=True))
        label_TK /= label_TK.sum(1, keepdims=True)
        share_K, error_JKK = _learned(label_TK, task_A, judge_A, given_A, judges)
        if np.abs(label_TK - before_TK).max() < _STILL:
            break
    return Agreement(label_TK, error_JKK, share_K)


def _learned(
    label_TK: NDArray[np.float64],
    task_A: NDArray[np.int64],
    judge_A: NDArray[np.int64],
    given_A: NDArray[np.int64],
    judges: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How common labels are, and the errors of the judges, if `label_TK` is right."""
    labels = label_TK.shape[1]
    error_JKK = np.zeros((judges, labels, labels))  # judge, given, right
    np.add.at(error_JKK, (judge_A, given_A), label_TK[task_A])
    error_JKK = np.maximum(error_JKK, _SMALLEST)
    error_JKK /= error_JKK.sum(1, keepdims=True)
    return label_TK.mean(0), error_JKK.transpose(0, 2, 1)
