"""The rows of run_overhead.py from the figures of its rounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_overhead import CASES, overhead_rows, seconds_to_first_byte

from penjing.core.errors import SetupError


def test_rows_are_medians_beside_what_they_are_compared_with(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 2_000_000)
    processes = [
        {"resident_bytes": 1e6 * i}
        | {f"step_ms_{name}": 8.0 for name in CASES}
        | {f"inside_ms_{name}": 6.0 for name in CASES}
        for i in (1, 4, 9)
    ]
    first, weights, *outside = overhead_rows(tmp_path, [1.0, 2.0, 9.0], [3.0, 5.0, 4.0], processes)
    assert (first.value, first.ratio, first.unit) == (4.0, 2.0, "s")
    assert (weights.value, weights.ratio, weights.unit) == (4.0, 2.0, "MB")
    assert [(row.value, row.ratio) for row in outside] == [(2.0, 0.25)] * len(CASES)


def test_a_process_that_writes_nothing_is_an_error() -> None:
    environment = dict(os.environ)
    assert seconds_to_first_byte(["-c", "print(1)"], environment) > 0
    with pytest.raises(SetupError, match="wrote nothing"):
        seconds_to_first_byte(["-c", "pass"], environment)
