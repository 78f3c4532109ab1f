"""What artifact folders of every family have in common: the names of their files, and how a folder says it is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.manifest import MANIFEST_NAME, read_json_object, read_manifest

RECIPE_FILE, REPORT_FILE, REPORT_PAGE, PARITY_FILE = "recipe.toml", "report.json", "report.html", "parity.json"
MODEL_FILE, QUANTIZATION_FILE = "model.onnx", "quantization.json"  # of artifacts that hold their network in ONNX


def is_artifact(folder: Path) -> bool:
    """Whether the manifest of `folder` says so; without a manifest it is none. No hash is checked.

    Raises:
        InputError: the manifest is damaged, or of a newer schema.
    """
    return (folder / MANIFEST_NAME).is_file() and read_manifest(folder).kind == "artifact"


def read_report_file(folder: Path) -> dict[str, Any]:
    """The content of `report.json`; empty for an artifact that no run has published yet.

    Raises:
        InputError: it is no JSON object.
    """
    return read_json_object(folder / REPORT_FILE) if (folder / REPORT_FILE).exists() else {}
