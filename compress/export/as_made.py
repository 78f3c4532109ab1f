"""An artifact's own ONNX file, for the engine that it was quantized for: text encoders and graphs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from penjing.compress.export.record import ExportRecord, Form, publish_file, source_of
from penjing.compress.parity.base import OnnxParity
from penjing.compress.quantize.targets import TargetName
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress


class AsMade:
    """Called with a folder, it writes the artifact's file to `out` after it passed the artifact's parity gate here."""

    def __init__(self, parity: type[OnnxParity[Any, Any]], *notes: str) -> None:
        """`notes`: what a user of the file must know."""
        self._parity = parity
        self._notes = notes

    def __call__(
        self, folder: Path, form: Form, out: Path, target: TargetName | None, _: bool, progress: Progress
    ) -> ExportRecord:
        """Export the artifact in `folder`.

        Args:
            target: None takes the artifact's own.

        Raises:
            ConfigError: the artifact is for another target.
            InputError: damaged, or beyond the parity bound.
        """
        artifact = self._parity.open(folder)
        quantization = artifact.quantization
        if target not in (None, quantization.target):
            raise ConfigError(
                f"--target {target}: {folder} was quantized for {quantization.target}, and {target} wants "
                f"other quantizers; make one with 'penjing compress {folder / 'recipe.toml'} "
                f"--set steps.0.target={target} --out …'"
            )
        progress.start("parity", 1)
        record = ExportRecord(
            form=form,
            target=quantization.target,
            **source_of(folder),
            session_options=quantization.session_options,
            differences=self._parity.compare(artifact, folder / MODEL_FILE, quantization),
            bound=artifact.parity.bound,
            unmeasured=artifact.parity.unmeasured,
            notes=self._notes,
        )
        progress.advance()
        publish_file(out, record, lambda partial: shutil.copyfile(folder / MODEL_FILE, partial))
        return record
