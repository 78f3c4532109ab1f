"""What checkpoints cost beside each other, as rows need it: sizes, and times taken in turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penjing.compress.families.base import family_at
from penjing.compress.measure.cost import MeasureSettings, sizes_of, timed
from penjing.core.progress import Progress, Silent


def measure(
    folders: Sequence[Path], settings: MeasureSettings, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """`size` and `widths` (see `sizes_of`) and `latency` (rows of `timed`) of checkpoints of one family.

    Raises:
        InputError: a folder is damaged.
        SetupError: too little memory for all of them.
    """
    family = family_at(folders[0])
    times = timed(folders, family.calls, settings, progress or Silent())
    return [
        sizes_of(folder, family.skeleton(folder)) | {"latency": rows}
        for folder, rows in zip(folders, times, strict=True)
    ]
