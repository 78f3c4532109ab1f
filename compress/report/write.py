"""The two reports that a compression run in steps leaves beside its result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.compress.report.run_page import flow_page
from penjing.compress.report.schema import parse_report
from penjing.core.artifact.decoder import REPORT_FILE, REPORT_PAGE
from penjing.core.files import atomic_write_text


def write_reports(folder: Path, report: dict[str, Any]) -> None:
    """Write `report` into `folder`, not yet published, as report.json and as the page report.html.

    Raises:
        InputError: it lacks something, named.
    """
    parsed = parse_report(report, str(folder / REPORT_FILE))
    atomic_write_text(folder / REPORT_FILE, json.dumps(report, indent=2) + "\n")
    atomic_write_text(folder / REPORT_PAGE, flow_page(parsed))
