"""The benchmark of long contexts, on a model of a few thousand parameters."""

from __future__ import annotations

import sys

import pytest
from run_long_context import CHOOSING, count_rows, engines, main, share_read

from penjing.serve.engine.config import EngineConfig
from tests.serve.tiny import tiny_config

FEW = EngineConfig.model_validate(
    {
        "attention": "window+blocks",
        "attention_window": 16,
        "attention_sink": 0,
        "attention_budget": 32,
        "attention_full_layers": 1,
    }
)


def test_what_is_read_is_counted() -> None:
    config = tiny_config()
    assert share_read(config, FEW, 31, None) == 1.0
    # One of two layers reads all 96 keys, the other 32 of them and, by their bytes, 5 summaries.
    assert share_read(config, FEW, 95, None) == pytest.approx((96 + 32) / 192)
    assert share_read(config, FEW, 95, "float32") == pytest.approx((96 + 32 + 5 * 24 / 64) / 192)
    rows = {row.metric: row for row in count_rows(tiny_config(num_hidden_layers=4))}
    assert rows["keys_read_16384"].value == pytest.approx(0.5 + 0.5 / 8)
    assert rows["bytes_per_token_int8"].ratio is not None


def test_the_table_has_engines_that_may_be_made() -> None:
    assert engines(False) == [CHOOSING]
    assert {engine.attention_block for engine in engines(True)} == {16, 32, 64}


def test_processor_time_is_of_one_thread(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads that wait for each other spin, which would count as work."""
    monkeypatch.setenv("PENJING_CPU_THREADS", "2")
    monkeypatch.setattr(sys, "argv", ["run_long_context.py", "--only", "steps", "--clock", "processor"])
    with pytest.raises(SystemExit):
        main()
    assert "OMP_NUM_THREADS=1" in capsys.readouterr().err
