"""Rows of the INT8 study from reports, and the pieces as recipes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_int8_quality
from run_int8_quality import Int8Study, quality_rows
from run_prune_quality import Studies

from penjing.compress.report.schema import Report, parse_report
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from tests.compress.report.reports import made_up_report


def report(before: int, after: int) -> Report:
    """On 200 images; 200 kB after."""
    return parse_report(made_up_report(right=(before, 0, after)), "x")


def test_rows_are_means_over_seeds_and_training_is_paired_with_calibration() -> None:
    reports = {
        "ptq": [report(190, 186), report(180, 178)],  # 2 and 1 points lost
        "qat": [report(190, 190), report(180, 176)],  # 0 and 2; 2 above and 1 below calibration
    }
    rows = {row.metric: row for row in quality_rows("fashion", reports, [1_600_000, 1_600_000])}
    assert rows["fashion_pruned_accuracy"].value == pytest.approx(92.5)
    assert rows["fashion_ptq_accuracy"].value == pytest.approx(91)
    assert rows["fashion_ptq_accuracy"].ratio == pytest.approx(91 / 92.5, rel=1e-3)
    assert rows["fashion_ptq_points_lost"].value == pytest.approx(1.5)
    assert rows["fashion_ptq_points_lost_sd"].value == pytest.approx(np.sqrt(0.5), rel=1e-3)
    assert rows["fashion_qat_points_lost"].value == pytest.approx(1)
    assert rows["fashion_qat_points_over_ptq"].value == pytest.approx(0.5)
    assert rows["fashion_qat_points_over_ptq_sd"].value == pytest.approx(np.sqrt(4.5), rel=1e-3)
    assert rows["fashion_qat_bytes"].ratio == pytest.approx(1 / 8)
    assert rows["fashion_qat_times_smaller"].value == pytest.approx(8)


def test_pieces_are_made_of_the_networks_that_lie_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dense-2", "l1-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "penjing.json").write_text("{}")  # never opened: what is there is taken as it is
    made: dict[str, dict[str, Any]] = {}

    def keep(_: Studies, values: dict[str, Any]) -> Report:
        made[Path(values["output"]).name] = values
        return report(190, 189)

    monkeypatch.setattr(Studies, "run", keep)
    options = {"quick": False, "work": tmp_path, "width": 32, "precision": "fp32", "device": "cpu"}
    networks = Studies(argparse.Namespace(**options, steps=None), Silent())
    study = Int8Study(argparse.Namespace(**options, steps=300), networks)
    for piece in run_int8_quality.PIECES:
        study.report(piece, 2)
    assert made.keys() == {"ptq-2", "ptq_equalized-2", "qat-300-steps-2"}
    steps = {}
    for name, values in made.items():
        assert values["model"] == str(tmp_path / "l1-2")
        (steps[name],) = values["steps"]
    assert (steps["qat-300-steps-2"]["steps"], steps["qat-300-steps-2"]["teacher"]) == (300, str(tmp_path / "dense-2"))
    assert (steps["ptq-2"]["steps"], "teacher" in steps["ptq-2"], "equalize" in steps["ptq-2"]) == (0, False, False)
    assert steps["ptq_equalized-2"]["equalize"]
    assert all(step["observer"] == "mse" for step in steps.values())


def test_an_unknown_piece_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run_int8_quality.py", "--pieces", "qta"])
    with pytest.raises(ConfigError, match="qta: there is no such piece; take ptq, ptq_equalized, qat"):
        run_int8_quality.main()
