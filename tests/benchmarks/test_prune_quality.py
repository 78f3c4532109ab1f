"""Rows of the pruning studies from reports, and Torch-Pruning's choice as a checkpoint of ours."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lib.prune_peer import NAME, prune_by_torch_pruning
from run_prune_quality import classifier_rows, decoder_rows, dense_rows

from penjing.compress.measure.evaluate import EvaluateSettings, perplexity
from penjing.compress.report.schema import Report, parse_report
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.progress import Silent
from tests.compress.report.reports import made_up_report


def test_rows_of_a_classifier_are_means_over_seeds() -> None:
    reports = [parse_report(made_up_report(right=right), "x") for right in ((190, 150, 188), (186, 160, 180))]
    rows = {
        row.metric: row for row in [*dense_rows("fashion", {"l1": reports}), *classifier_rows("fashion", "l1", reports)]
    }
    assert rows["fashion_dense_accuracy"].value == pytest.approx(94)
    assert rows["fashion_dense_accuracy_sd"].value == pytest.approx(np.sqrt(2), rel=1e-3)
    assert rows["fashion_l1_removed_accuracy"].value == pytest.approx(77.5)
    assert rows["fashion_l1_healed_accuracy"].ratio == pytest.approx(92 / 94, rel=1e-3)
    assert rows["fashion_l1_points_lost"].value == pytest.approx(2)  # 1 and 3
    assert rows["fashion_l1_points_lost_sd"].value == pytest.approx(np.sqrt(2), rel=1e-3)
    speed = rows["fashion_l1_speed_onnxruntime_batch_64"]
    assert speed.ratio == pytest.approx(1.4, rel=1e-3)
    assert speed.share_of_limit == pytest.approx(1.4 * 5 / 8, rel=1e-3)


def decoder_report(*stages: tuple[str, float]) -> Report:
    values: dict[str, Any] = made_up_report()
    first = values["stages"][0]
    values["stages"] = [
        first | {"kind": kind, "quality": asdict(perplexity({"prose": [float(np.log(value))] * 2}, EvaluateSettings()))}
        for kind, value in stages
    ]
    return parse_report(values, "x")


def test_rows_of_a_decoder_stand_against_dense_and_torch_pruning() -> None:
    reports = {
        "activation": decoder_report(("model", 10), ("prune", 20), ("distill", 12)),
        "torch_pruning": decoder_report(("model", 40), ("distill", 16)),
    }
    found = {(row.metric, row.baseline): (row.value, row.ratio) for row in decoder_rows(reports)}
    assert found["smollm2_activation_removed_perplexity", "dense"] == pytest.approx((20, 2))
    assert found["smollm2_activation_removed_perplexity", NAME] == pytest.approx((20, 0.5))
    assert found["smollm2_activation_healed_perplexity", NAME] == pytest.approx((12, 0.75))
    assert found["smollm2_torch_pruning_removed_perplexity", "dense"] == pytest.approx((40, 4))


@pytest.mark.filterwarnings("ignore:Unwrapped parameters")
def test_torch_prunings_choice_is_that_of_its_l1_norm(tiny_checkpoint: Path, tmp_path: Path) -> None:
    prune_by_torch_pruning(tiny_checkpoint, tmp_path / "out", 0.25, 8, Silent())
    before, after = open_checkpoint(tiny_checkpoint), open_checkpoint(tmp_path / "out")
    assert after.config.intermediate_size == 72  # 96 − 24
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        weights = {name: before.get(f"{mlp}.{name}.weight").numpy() for name in ("gate_proj", "up_proj", "down_proj")}
        # The mean over the three weights of each channel's sum of absolute values: their order is the sums' order.
        norms = sum(np.abs(w if name != "down_proj" else w.T).sum(1) for name, w in weights.items())
        kept = np.sort(np.argsort(norms)[24:])
        np.testing.assert_array_equal(after.get(f"{mlp}.gate_proj.weight").numpy(), weights["gate_proj"][kept])
        np.testing.assert_array_equal(after.get(f"{mlp}.down_proj.weight").numpy(), weights["down_proj"][:, kept])
