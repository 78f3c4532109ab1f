"""`/reports/NAME`: what compression did to a served model, stage by stage, out of the report in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.artifact.base import read_report_file
from penjing.core.errors import InputError
from penjing.serve.gate.errors import ApiError

_QUALITY = ("name", "value", "low", "high")
_SIZE = ("parameters", "bytes")


def stages(folder: Path, name: str) -> dict[str, Any]:
    """`{"model": name, "stages": [{"name", "parameters", "bytes", "quality": {"name", "value", "low", "high"}}]}`, and
    nothing else of the report: it has paths of the machine that made it.

    Args:
        folder: of the artifact.
        name: what the client calls it.

    Raises:
        ApiError: 404, where no run has reported about the model, or its report cannot be read.
    """
    try:
        found = read_report_file(folder).get("stages", [])
        shown = [
            {"name": stage["name"]}
            | {key: stage["size"][key] for key in _SIZE}
            | {"quality": {key: stage["quality"].get(key) for key in _QUALITY}}
            for stage in found
        ]
    except (InputError, OSError, KeyError, TypeError, AttributeError):
        raise ApiError(404, f"The report of {name} cannot be read.", code="no_report") from None
    if not shown:
        raise ApiError(404, f"There is no report of {name}: it is not the outcome of a compression.", code="no_report")
    return {"model": name, "stages": shown}
