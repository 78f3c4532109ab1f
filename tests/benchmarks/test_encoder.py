"""The benchmark of text encoders, on a small one with random weights."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import run_encoder
from lib.rows import Row
from run_encoder import encoder_rows

from penjing.compress.run import run_recipe
from penjing.core.imports.importer import import_model
from tests.core.models.encoders import small_recipe, write_sentence_transformer

pytestmark = pytest.mark.xdist_group("encoder-rows")  # what all share is made once


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


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def rows(arguments: argparse.Namespace, scratch: Path) -> list[Row]:
    return encoder_rows(scratch, arguments)


def test_rows_of_a_small_encoder(rows: list[Row]) -> None:
    found = {row.metric.removeprefix("onnxruntime-cpu/"): row for row in rows}
    for name in ("int8", "onnxruntime_dynamic"):
        cosine, size = found[f"{name}/cosine_mean"].value, found[f"{name}/bytes"].ratio
        assert cosine is not None
        assert size is not None
        assert 0.9 < cosine < 1, name
        assert size < 1
        assert found[f"{name}/throughput"].ratio is not None
    assert found["fp32/throughput"].baseline is None
    assert found["int8/ahead"].value is not None


def test_exact_rows_alone(
    arguments: argparse.Namespace, rows: list[Row], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in ("export_network", "export_fused", "quantize_dynamically"):
        monkeypatch.setattr(run_encoder, made, lambda *_: None)  # the files are there
    exact = encoder_rows(scratch, argparse.Namespace(**{**vars(arguments), "exact": True}))
    assert {row.unit for row in exact} == {"B", "cosine", "share"}
    assert {row.metric for row in exact} < {row.metric for row in rows}
