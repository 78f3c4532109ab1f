"""A graph's artifact as one ONNX file, for the engine that it was quantized for."""

from __future__ import annotations

from pathlib import Path

from penjing.compress.export.record import ExportRecord, Form, publish_file, source_of
from penjing.compress.graph.parity import compare_graph_file
from penjing.compress.quantize.targets import TargetName
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx_graph import open_graph_artifact
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress


def export_graph(
    folder: Path, form: Form, out: Path, target: TargetName | None, _: bool, progress: Progress
) -> ExportRecord:
    """Write the file of the artifact in `folder` to `out` after it passed the artifact's parity gate here.

    Args:
        target: None takes the artifact's own.

    Raises:
        ConfigError: the artifact is for another target.
        InputError: damaged, or beyond the parity bound.
    """
    artifact = open_graph_artifact(folder)
    own = artifact.quantization.target
    if target not in (None, own):
        raise ConfigError(
            f"{folder} was quantized for {own}, and pairs stand elsewhere for {target}: make an artifact with "
            f"--set steps.0.target={target}"
        )
    progress.start("parity", 1)
    record = ExportRecord(
        form=form,
        target=own,
        **source_of(folder),
        session_options=artifact.quantization.session_options,
        differences=compare_graph_file(artifact, folder / MODEL_FILE),
        bound=artifact.parity.bound,
        unmeasured=artifact.parity.unmeasured,
    )
    progress.advance()
    data = (folder / MODEL_FILE).read_bytes()
    publish_file(out, record, lambda partial: partial.write_bytes(data))
    return record
