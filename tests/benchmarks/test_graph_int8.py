"""The comparison of INT8 quantizers on imported networks: what its figures mean, and where its images come from."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from lib.photos import cut_photos
from lib.processor_time import clock_of
from PIL import Image
from run_graph import nncf, quality, rows_of

from penjing.core.errors import InputError


def test_quality_of_logits_and_of_probabilities() -> None:
    logits = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    same = quality(logits, logits)
    assert (same["agreement"], same["error"]) == (1, 0)
    assert same["kl"] == pytest.approx(0, abs=1e-12)
    shifted = logits + np.float32(3)
    assert quality(logits, shifted)["kl"] == pytest.approx(0, abs=1e-6)
    chances = np.array([[0.5, 0.5], [0.9, 0.1]], np.float32)
    other = np.array([[0.25, 0.75], [0.9, 0.1]], np.float32)
    assert quality(chances, other)["kl"] == pytest.approx(0.5 * (0.5 * np.log(2) + 0.5 * np.log(2 / 3)), rel=1e-5)
    assert quality(chances, other)["agreement"] == 0.5


def test_a_contestant_that_is_missing_has_rows_with_the_reason(tmp_path: Path) -> None:
    reason = nncf(tmp_path, None, tmp_path / "fp32.onnx", np.zeros((1, 3, 4, 4), np.float32))
    fp32 = {"bytes": 100.0, "milliseconds": 4.0}
    rows = rows_of("net/nncf", None, fp32, reason, 3)
    assert {row.value for row in rows} == {None}
    assert {row.reason for row in rows} == {"no --nncf"}
    found = {"agreement": 1.0, "kl": 0.0, "error": 0.1, "bytes": 25.0, "milliseconds": 1.0}
    ratios = {row.metric: row.ratio for row in rows_of("net/penjing", found, fp32, tmp_path, 3)}
    assert ratios["net/penjing/bytes"] == ratios["net/penjing/milliseconds"] == 0.25
    assert ratios["net/penjing/kl"] is None


def test_squares_are_cut_alike_and_missing_packages_are_named(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (210, 220, 3), np.uint8)
    for name in (
        "mate/nature/Dune.jpg",
        "mate/abstract/Silk.png",
        "sklearn/datasets/china.jpg",
        "skimage/data/coins.png",
    ):
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "from" / name)
    for out in ("one", "two"):
        seen, held = cut_photos(tmp_path / "from", tmp_path / out)
        assert (len(list(seen.iterdir())), len(list(held.iterdir()))) == (16, 32)
    one, two = ((tmp_path / out / "held" / "0007.png").read_bytes() for out in ("one", "two"))
    assert one == two
    with pytest.raises(InputError, match=r"lacks photographs.*benchmarks/lib/photos.py"):
        cut_photos(tmp_path / "one", tmp_path / "three")


def test_processor_time_is_of_one_thread_and_its_rows_are_called_so(tmp_path: Path) -> None:
    arguments = Namespace(processor_time=True, threads=0)
    assert (clock_of(arguments), arguments.threads) == (time.process_time, 1)
    assert clock_of(Namespace(processor_time=False)) is time.perf_counter
    found = {"agreement": 1.0, "kl": 0.0, "error": 0.1, "bytes": 25.0, "milliseconds": 1.0}
    metrics = {row.metric for row in rows_of("net/penjing", found, found, tmp_path, 3, "processor_")}
    assert "net/penjing/processor_milliseconds" in metrics
    assert "net/penjing/milliseconds" not in metrics
