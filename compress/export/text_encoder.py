"""A text encoder's artifact as one ONNX file, for the target that it was made for."""

from __future__ import annotations

import shutil
from pathlib import Path

from penjing.compress.export.record import ExportRecord, Form, publish_file, source_of
from penjing.compress.quantize.encoder_parity import rerun
from penjing.compress.quantize.targets import TargetName
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx_encoder import open_encoder_artifact
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress


def export_text_encoder(
    folder: Path, _: Form, out: Path, target: TargetName | None, __: bool, progress: Progress
) -> ExportRecord:
    """Write the artifact in `folder` to `out` after its parity was measured again here.

    Raises:
        ConfigError: `target` is not the artifact's.
        InputError: damaged, or beyond the parity bound.
    """
    artifact = open_encoder_artifact(folder)
    own = artifact.quantization.target
    if target not in (None, own):
        raise ConfigError(
            f"--target {target}: {folder} is calibrated for {own}; make one with "
            f"'penjing compress {folder / 'recipe.toml'} --set steps.0.target={target} --out …'"
        )
    differences = rerun(folder, progress)
    record = ExportRecord(
        form="onnx",
        target=own,
        **source_of(folder),
        session_options=artifact.quantization.session_options,
        differences=differences,
        bound=artifact.parity.bound,
        notes=("takes token ids and their mask; the tokenizer is the artifact's tokenizer.json",),
    )
    publish_file(out, record, lambda partial: shutil.copyfile(folder / MODEL_FILE, partial))
    return record
