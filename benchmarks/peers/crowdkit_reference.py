"""Prints what crowd-kit finds for answers that a test has too: probabilities and errors of Dawid and Skene's method.

    python -m venv build/peers/data/venv && build/peers/data/venv/bin/pip install -r benchmarks/peers/data.txt
    build/peers/data/venv/bin/python benchmarks/peers/crowdkit_reference.py > tests/curate/reference/dawid_skene.json

Five judges answer for 40 tasks of three labels, each with errors of its own; not everybody answers for every task.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pandas as pd  # pyright: ignore[reportMissingImports]
from crowdkit.aggregation import DawidSkene  # pyright: ignore[reportMissingImports]

TASKS, JUDGES, LABELS = 40, 5, 3


def main() -> None:
    dice = np.random.default_rng(7)
    right = dice.integers(LABELS, size=TASKS)
    skill = [0.9, 0.8, 0.7, 0.6, 0.4]
    answers = [
        (task, judge, int(right[task] if dice.random() < skill[judge] else dice.integers(LABELS)))
        for task in range(TASKS)
        for judge in range(JUDGES)
        if dice.random() < 0.8 or judge == 0
    ]
    model = DawidSkene(n_iter=100, tol=-np.inf).fit(pd.DataFrame(answers, columns=["task", "worker", "label"]))
    errors = model.errors_.fillna(0.0)
    json.dump(
        {
            "answers": answers,
            "label": model.probas_.sort_index()[sorted(model.probas_)].to_numpy().tolist(),
            "error": [
                [[float(errors[right].get((judge, given), 0.0)) for given in range(LABELS)] for right in range(LABELS)]
                for judge in range(JUDGES)
            ],
            "share": model.priors_.sort_index().to_list(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
