"""What an export says of itself: `export.json` in a folder, `NAME.json` beside a file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from penjing.core.artifact.parity import Bound, Difference
from penjing.core.config import Config
from penjing.core.files import atomic_write_text, sha256_file, sync_tree, writing
from penjing.core.info import versions
from penjing.core.manifest import MANIFEST_NAME

RECORD_FILE = "export.json"
Form = Literal["onnx", "tensorrt", "compressed-tensors", "compressed-tensors-weights", "transformers", "gguf"]


class ExportRecord(Config):
    """How an export was made, and how far its own loader is from the fake-quantized model."""

    schema_version: Literal[2] = Field(default=2, description="Version of this format.")
    form: Form = Field(description="Form of the export.")
    target: str | None = Field(default=None, description="The engine that it is for, where the form leaves a choice.")
    artifact: str = Field(description="Name of the artifact's folder.")
    manifest: str = Field(description="SHA-256 of the artifact's manifest, which holds those of its files.")
    session_options: dict[str, str] = Field(
        default_factory=dict, description="Of ONNX Runtime, which the file needs for exact integers on every processor."
    )
    differences: tuple[Difference, ...] = Field(
        default=(), description="How far its own loader is from the fake-quantized model."
    )
    bound: Bound | None = Field(default=None, description="Which of the differences was held to what.")
    unmeasured: dict[str, str] = Field(default_factory=dict, description="Loader → why it did not run here.")
    notes: tuple[str, ...] = Field(default=(), description="What a user of the file must know.")
    versions: dict[str, str] = Field(default_factory=versions, description="Of the packages that wrote it.")


def source_of(folder: Path) -> dict[str, Any]:
    """The fields of a record that say which artifact it is of."""
    return {"artifact": folder.name, "manifest": sha256_file(folder / MANIFEST_NAME)}


def beside(file: Path) -> Path:
    """Where the record of an export that is one file lies."""
    return file.with_name(f"{file.name}.json")


def write_record(path: Path, record: ExportRecord) -> None:
    """Write `record` to the file `path`."""
    atomic_write_text(path, json.dumps(record.model_dump(mode="json"), indent=2) + "\n")


def publish_file(out: Path, record: ExportRecord, write: Callable[[Path], object]) -> None:
    """Make the file `out`, and `record` beside it; neither has its name before both are complete on the disk.

    Args:
        write: fills the path that it is given.

    Raises:
        SetupError: disk full, no permission.
    """
    folder = out.with_name(f".{out.name}.partial-{os.getpid()}")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        try:
            write(folder / out.name)
            write_record(beside(folder / out.name), record)
            sync_tree(folder)
            os.replace(beside(folder / out.name), beside(out))
            os.replace(folder / out.name, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
