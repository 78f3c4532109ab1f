"""The comparison of INT8 quantizers, on a small network with random weights and images."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import run_int8_peers
from run_int8 import synthetic
from run_int8_peers import peer_rows, quality

from penjing.compress.quantizers.classifier import ArtifactSettings
from penjing.compress.samples.data import ImageData
from penjing.core.checkpoint.classifier import save_classifier
from penjing.core.errors import SetupError
from penjing.core.files import publish_folder
from penjing.core.models.resnet_config import cifar_resnet
from penjing.train.data.images import ImageSet

SIDE = 12


def test_rows_of_each_and_null_rows_of_a_peer_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = synthetic(cifar_resnet(8, 10, width=8, in_channels=1), SIDE)
    config = config.model_copy(update={"mean": (0.5,), "std": (0.25,)})
    with publish_folder(tmp_path / "fp32") as unfinished:
        save_classifier(unfinished, config, model, {"command": "test"})
    images = np.random.default_rng(0).integers(0, 256, (24, 1, SIDE, SIDE), np.uint8)
    few = ImageSet(images, np.zeros(24, np.uint8), 10)

    def missing(command: list[str], what: str) -> str:
        raise SetupError(f"{what} is not here")

    monkeypatch.setattr(run_int8_peers, "fitting_images", lambda *_: few)
    monkeypatch.setattr(run_int8_peers, "image_samples", lambda *_: ImageData(few, config.mean, config.std, 8))
    monkeypatch.setattr(run_int8_peers, "_run", missing)
    # random weights tell images apart less than trained ones, so roundings weigh more
    monkeypatch.setattr(run_int8_peers, "ArtifactSettings", lambda **k: ArtifactSettings(**{**k, "parity_bound": 1000}))
    arguments = argparse.Namespace(
        model=tmp_path / "fp32",
        target="onnxruntime-avx2",
        calibrate=24,
        images=24,
        rounds=1,
        seconds=0.0,
        batch=4,
        threads=1,
        quick=True,
    )
    rows = {row.metric.removeprefix("onnxruntime-avx2/"): row for row in peer_rows(tmp_path, arguments)}
    for name in ("penjing_minmax", "penjing_mse", "onnxruntime_static"):
        ratio, divergence = rows[f"{name}/bytes"].ratio, rows[f"{name}/kl"].value
        assert ratio is not None
        assert ratio < 0.7
        assert divergence is not None
        assert 0 < divergence < 0.2, name
        assert rows[f"{name}/milliseconds"].ratio is not None
    assert rows["nncf/kl"].value is None
    assert rows["nncf/kl"].reason == "the environment of NNCF is not here"


def test_quality_is_of_softmaxes_and_classes() -> None:
    before = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
    after = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32)) + 7
    found = quality(before, after, np.array([0, 0], np.uint8))
    assert found["accuracy"] == 1.0
    assert found["agreement"] == 0.5
    # Σ p ln(p/q) of the second row: 0.25 ln 0.5 + 0.5 ln 2 = 0.25 ln 2
    assert found["kl"] == pytest.approx(0.25 * np.log(2) / 2, rel=1e-5)
