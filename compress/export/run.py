"""`penjing export`: an artifact in the form that another engine reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from penjing.compress.data import is_classifier
from penjing.compress.export.gguf import write_gguf
from penjing.compress.verify import verify_artifact
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_bytes, writing
from penjing.core.progress import Progress
from penjing.core.vision_artifact import MODEL_FILE

Form = Literal["onnx", "gguf"]


def export_artifact(folder: Path, form: Form, out: Path, *, force: bool, progress: Progress) -> Path:
    """Write the artifact in `folder` as `form` to the file `out`, which appears when it is complete.

    "onnx" is for classifiers: the file of the artifact, after its parity was measured again here. "gguf" is for
    decoders: Q8_0 with the artifact's own integers, after its hashes were checked.

    Raises:
        InputError: damaged, of a kind that has no such form, beyond its parity bound, or `out` exists.
    """
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the name of the file to write, such as {out / f'model.{form}'}")
    if out.exists() and not force:
        raise InputError(f"{out} already exists; replace it with --force, or choose another file")
    if is_classifier(folder) != (form == "onnx"):
        raise InputError(f"{folder} cannot be written as {form}: onnx is for classifiers, gguf for decoders")
    if form == "gguf":
        partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
        with writing(out):
            try:
                write_gguf(folder, partial, progress)
                os.replace(partial, out)
            finally:
                partial.unlink(missing_ok=True)
        return out
    verify_artifact(folder, progress)
    atomic_write_bytes(out, (folder / MODEL_FILE).read_bytes())
    return out
