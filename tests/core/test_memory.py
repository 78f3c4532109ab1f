"""Peaks of resident memory, of blocks inside each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penjing.core.memory import PeakMemory, release_unused
from penjing.core.work import Tasks

LARGE = 256 << 20


def touch(size: int) -> None:
    """Hold `size` bytes for a moment."""
    np.ones(size, np.uint8)


def test_an_outer_peak_is_not_smaller_than_an_inner_one() -> None:
    release_unused()
    before = PeakMemory.resident_bytes()
    with PeakMemory() as outer:
        with PeakMemory() as middle:
            with PeakMemory() as inner:
                touch(LARGE)
            touch(1000)
        touch(1000)
    assert inner.peak_bytes > before + 0.9 * LARGE
    assert inner.peak_bytes <= middle.peak_bytes <= outer.peak_bytes


def test_what_lay_before_an_inner_block_stays_the_outer_one_s_peak() -> None:
    """The system's mark is set back where a block begins."""
    release_unused()
    before = PeakMemory.resident_bytes()
    with PeakMemory() as outer:
        touch(LARGE)
        with PeakMemory() as first:
            touch(1000)
        with PeakMemory() as second:
            touch(1000)
    assert outer.peak_bytes > before + 0.9 * LARGE
    assert max(first.peak_bytes, second.peak_bytes) <= outer.peak_bytes


def test_a_block_that_fails_is_closed_too() -> None:
    outer = PeakMemory()
    with pytest.raises(KeyError), outer, PeakMemory():
        raise KeyError
    closed = outer.peak_bytes
    with PeakMemory():
        touch(LARGE)
    assert outer.peak_bytes == closed  # what comes later is not its own


def test_the_record_of_a_task_covers_the_tasks_inside_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    release_unused()  # what earlier tests freed would lie in the baseline
    outside = Tasks(tmp_path)
    inside = Tasks(tmp_path / "inner", outside.baseline)

    def work() -> dict[str, int]:
        return {"inner": inside.run("layer", lambda: {"done": touch(LARGE)}).peak_memory_bytes}

    record = outside.run("step", work)
    assert record.result["inner"] > 0.9 * LARGE
    assert record.peak_memory_bytes >= record.result["inner"]
