"""The simulator against torch's schedules, run by four processes whose stages take known times."""

from __future__ import annotations

import pytest

from penjing.train.pipeline.schedules import Schedule
from penjing.train.pipeline.simulate import StageTimes, simulate
from tests.train.pipeline import sleeping_pipeline

UNEVEN = [0.03, 0.04, 0.024, 0.034]
CASES: list[tuple[Schedule, list[float], int]] = [
    ("gpipe", UNEVEN, 8),
    ("1f1b", UNEVEN, 8),
    ("interleaved", [0.015, 0.02, 0.012, 0.017, 0.016, 0.014, 0.02, 0.015], 8),
]


@pytest.mark.full
def test_the_simulator_foretells_real_steps(tmp_path):
    measured = sleeping_pipeline.run(4, CASES, tmp_path)
    for (schedule, costs, micro_batches), seconds in zip(CASES, measured, strict=True):
        line = simulate(schedule, 4, StageTimes.of_costs(costs), [1.0] * micro_batches)
        assert 0.98 < seconds / line.makespan < 1.25, schedule  # a busy machine wakes processes late
