"""Rows of decoders with fewer tokens."""

from __future__ import annotations

from pathlib import Path

from run_vocabulary import cost_rows, measured, size_row, smaller

from penjing.compress.measure.evaluate import Change
from penjing.compress.vocabulary.smaller import Cost
from penjing.core.progress import Silent
from penjing.core.text.corpus import heldout_text
from tests.compress.vocabulary.test_command import write_decoder


def test_rows_of_a_small_decoder(tmp_path: Path) -> None:
    whole = write_decoder(tmp_path / "whole")
    small = smaller(whole, 0.8, tmp_path / "small")
    before = (small / "penjing.json").stat().st_mtime_ns
    assert smaller(whole, 0.8, tmp_path / "small") == small
    assert (small / "penjing.json").stat().st_mtime_ns == before
    assert size_row("tiny", small).value == (514 - 384) * 64
    texts = {"prose": [heldout_text()[begin : begin + 200] for begin in (0, 200)]}
    rows = {row.metric: row.value or 0.0 for row in cost_rows("tiny", measured(whole, small, texts, Silent()), {})}
    assert rows["tiny/prose_longer"] > 0
    assert rows["tiny/prose_rise_low"] <= rows["tiny/prose_rise"] <= rows["tiny/prose_rise_high"]
    assert rows["tiny/worst_rise"] == rows["tiny/prose_rise"]


def test_the_worst_is_the_largest_rise() -> None:
    found = {name: Cost(Change(value, value, value), 0.0) for name, value in (("a", 0.01), ("b", 0.03), ("c", 0.02))}
    assert {row.metric: row.value for row in cost_rows("x", found, {})}["x/worst_rise"] == 3.0
