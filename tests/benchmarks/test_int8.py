"""The INT8 benchmark on a small network."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from run_int8 import narrower, shape_rows

from penjing.core.models.resnet_config import imagenet_resnet


def test_rows_of_a_small_network(tmp_path: Path) -> None:
    arguments = argparse.Namespace(tiny=True, sizes=False, rounds=1, seconds=0.0, batch=2, threads=1)
    rows = {row.metric: row for row in shape_rows(tmp_path, arguments)}
    size, narrow = (rows[f"tiny/{label}/onnxruntime-cpu/size"].ratio for label in ("int8", "int8_narrow"))
    assert size is not None
    assert narrow is not None
    assert narrow < size < 0.4
    assert rows["tiny/int8_narrow/onnxruntime-avx2/throughput"].baseline is not None
    assert rows["tiny/fp32/throughput"].baseline is None
    assert rows["tiny/onnxruntime-avx2/fold_quantize_export"].unit == "s"


@pytest.mark.full  # the same files as above, made again
def test_sizes_alone(tmp_path: Path) -> None:
    rows = shape_rows(tmp_path, argparse.Namespace(tiny=True, sizes=True, rounds=1, seconds=0.0, batch=2, threads=1))
    assert {row.unit for row in rows} == {"B"}
    assert len(rows) == 5


def test_a_quarter_of_the_channels_goes() -> None:
    config = narrower(imagenet_resnet(50))
    assert config.stem_channels == 48
    assert [stage.channels for stage in config.stages] == [192, 384, 768, 1536]
    assert config.stages[0].blocks[0].hidden == (48, 48)
