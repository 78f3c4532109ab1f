"""`penjing export`: an artifact in the form that another engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from penjing.compress.data import is_classifier
from penjing.compress.verify import verify_artifact
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_bytes
from penjing.core.progress import Progress
from penjing.core.vision_artifact import MODEL_FILE

Form = Literal["onnx"]


def export_artifact(folder: Path, form: Form, out: Path, *, force: bool, progress: Progress) -> Path:
    """Write the artifact in `folder` as `form` to the file `out`, which appears when it is complete.

    "onnx" is for classifiers: the file of the artifact, after its parity was measured again here.

    Raises:
        InputError: damaged, of a kind that has no such form, beyond its parity bound, or `out` exists.
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of the file to write, such as {out / f'model.{form}'}")
    if out.exists() and not force:
        raise InputError(f"{out} already exists; replace it with --force, or choose another file")
    if not is_classifier(folder):
        raise InputError(f"{folder} is no artifact of a classifier; only these have an ONNX file")
    verify_artifact(folder, progress)
    atomic_write_bytes(out, (folder / MODEL_FILE).read_bytes())
    return out
