"""A fastText classifier (https://arxiv.org/abs/1607.01759) that learns what a slower model decides, and the band of its
scores in which it is not sure enough to decide alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.curate.documents.needs import needed

_READ = 10_000  # characters: of longer documents the beginning and the end
_YES, _NO = "__label__yes", "__label__no"
_OPTIONS = {
    "lr": 0.5, "epoch": 10, "dim": 16, "wordNgrams": 2, "minn": 3, "maxn": 5, "bucket": 200_000, "minCount": 2,
    "loss": "softmax", "thread": 1, "verbose": 0,
}  # fmt: skip
# With one thread fastText 0.9.2 sets a tenth of its table and leaves the rest as memory comes, which may hold anything
# (training then ends with "NaN"). In a process of its own whose large pieces come from the system the rest is zero.
_TRAIN = """
import json, sys, fasttext
fasttext.train_supervised(sys.argv[1], **json.loads(sys.argv[3])).save_model(sys.argv[2])
"""
_FRESH = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_FEWEST = 20  # documents on a side of the band, else their share of errors is a guess


def fit_student(path: Path, texts: list[str], y_N: NDArray[np.bool_]) -> Student:
    """Learn (N,) `y_N` of `texts`, on one thread and so the same every time, and write the model to `path`."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as file:
        for text, yes in zip(texts, y_N, strict=True):
            file.write(f"{_YES if yes else _NO} {_line(text)}\n")
        file.flush()
        needed("fasttext")
        command = [sys.executable, "-c", _TRAIN, file.name, str(path), json.dumps(_OPTIONS)]
        done = subprocess.run(command, env={**os.environ, **_FRESH}, capture_output=True, text=True, check=False)
    if done.returncode or not path.exists():
        raise InputError(f"fastText cannot learn from these documents: {done.stderr.strip()[-300:]}")
    return Student(path)


class Student:
    """A model that `fit_student` wrote."""

    def __init__(self, path: Path) -> None:
        self._model: Any = needed("fasttext").load_model(str(path))

    def __call__(self, text: str) -> float:
        """How sure it is of yes, 0 to 1."""
        # the binding's own predict() wraps the result into numpy 1's arrays
        found = {label: share for share, label in self._model.f.predict(f"{_line(text)}\n", 2, 0.0, "strict")}
        return min(1.0, float(found.get(_YES, 0.0)))


def sure_band(student_N: NDArray[np.float64], teacher_N: NDArray[np.bool_], wrong: float) -> tuple[float, float]:
    """(low, high): of the examples below low, and of those from high on, at most the share `wrong` is not as the
    teacher says. (-1, 2) where no side has enough examples."""
    order = np.argsort(student_N, kind="stable")
    scores, yes = student_N[order], teacher_N[order]
    below = _sure(scores, yes, wrong)
    above = _sure(-scores[::-1], ~yes[::-1], wrong)
    high = float(scores[len(scores) - above]) if above else 2.0
    low = -1.0 if not below else float(scores[below]) if below < len(scores) else 2.0
    return min(low, high), high


def _sure(scores: NDArray[np.float64], bad: NDArray[np.bool_], wrong: float) -> int:
    """How long the longest beginning of ascending `scores` is of which the share `wrong` at most is bad."""
    counts = np.arange(1, len(scores) + 1)
    ends = np.append(scores[1:] > scores[:-1], True)  # equal scores are decided alike
    fine = np.flatnonzero((np.cumsum(bad) <= wrong * counts) & (counts >= _FEWEST) & ends)
    return int(counts[fine[-1]]) if len(fine) else 0


def _line(text: str) -> str:
    some = text if len(text) <= _READ else f"{text[: _READ // 2]} {text[-_READ // 2 :]}"
    return " ".join(some.replace("__label__", "").split())
