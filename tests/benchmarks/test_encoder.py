"""The benchmark of text encoders, on a small one with random weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from run_encoder import encoder_rows

from penjing.compress.run import run_recipe
from penjing.core.imports.importer import import_model
from tests.core.models.encoders import small_recipe, write_sentence_transformer


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    folder = tmp_path_factory.mktemp("encoder")
    checkpoint = import_model(str(write_sentence_transformer(folder / "source")), folder / "tiny")
    artifact = run_recipe(small_recipe(checkpoint, folder / "int8"))
    return argparse.Namespace(
        model=artifact,
        checkpoint=checkpoint,
        queries=8,
        texts=8,
        rounds=1,
        seconds=0.0,
        threads=1,
        exact=False,
        processor_time=False,
    )


def test_rows_of_a_small_encoder(arguments: argparse.Namespace, tmp_path: Path) -> None:
    rows = {row.metric.removeprefix("onnxruntime-cpu/"): row for row in encoder_rows(tmp_path, arguments)}
    for name in ("int8", "onnxruntime_dynamic"):
        cosine, size = rows[f"{name}/cosine_mean"].value, rows[f"{name}/bytes"].ratio
        assert cosine is not None
        assert size is not None
        assert 0.9 < cosine < 1, name
        assert size < 1
        assert rows[f"{name}/throughput"].ratio is not None
    assert rows["fp32/throughput"].baseline is None
    assert rows["int8/ahead"].value is not None


def test_exact_rows_alone(arguments: argparse.Namespace, tmp_path: Path) -> None:
    exact = argparse.Namespace(**{**vars(arguments), "exact": True})
    assert {row.unit for row in encoder_rows(tmp_path, exact)} == {"B", "cosine", "share"}
