"""`penjing compress sensitivity`: to pruning, or to bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.report.study_page import print_study
from penjing.compress.sensitivity.kinds import TO_BITS, TO_PRUNING
from penjing.core.progress import progress_bar


def run_sensitivity(
    checkpoint: Path, flags: dict[str, Any], *, bits: bool, out: Path | None, force: bool
) -> dict[str, Any]:
    """Measure, and show the table on standard error.

    Args:
        flags: of the command line by name; each of the studies takes its own.

    Raises:
        PenjingError: as `Sensitivity.settings_of` and `Sensitivity.measure` say.
    """
    study = TO_BITS if bits else TO_PRUNING
    settings = study.settings_of(checkpoint, flags)
    with progress_bar() as progress:
        result = study.measure(checkpoint, settings, out=out, force=force, progress=progress)
    print_study(result)
    return result
