"""Rows of runs that are repeated with seeds, and how often a mixture raised a domain."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from lib.paired import paired_rows
from run_mixing import rises


def test_changes_are_of_pairs_with_students_interval() -> None:
    losses = {("a", seed): {"text": 2.0 + seed} for seed in range(3)}
    losses |= {("b", seed): {"text": 2.0 + seed + change} for seed, change in enumerate((0.1, 0.2, 0.3))}
    rows = {row.metric: row for row in paired_rows("x", losses, 3, "a", "the first")}
    assert rows["a/text"].value == pytest.approx(math.exp(3.0), rel=1e-3)
    assert rows["b/text"].ratio == pytest.approx(math.exp(0.2), rel=1e-3)
    wide = 4.303 * 0.1 / math.sqrt(3)  # a standard deviation of 0.1, two degrees of freedom
    assert rows["b/text_change"].value == pytest.approx(100 * math.expm1(0.2), rel=1e-3)
    assert rows["b/text_change_low"].value == pytest.approx(100 * math.expm1(0.2 - wide), rel=1e-2)
    assert rows["b/text_change_high"].value == pytest.approx(100 * math.expm1(0.2 + wide), rel=1e-3)


def test_one_seed_has_no_interval() -> None:
    rows = paired_rows("x", {("a", 0): {"t": 1.0}, ("b", 0): {"t": 1.1}}, 1, "a", "the first")
    assert [row.metric for row in rows] == ["a/t", "b/t", "b/t_change"]


def test_rises_of_shares_are_counted_in_the_log_of_a_run(tmp_path: Path) -> None:
    shares = [{"mixing/a": 0.5, "mixing/b": 0.5}, {"loss": 1.0}, {"mixing/a": 0.6, "mixing/b": 0.4}]
    lines = [*shares, {"mixing/a": 0.6, "mixing/b": 0.4}, {"mixing/a": 0.5, "mixing/b": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert rises(tmp_path) == 2
