"""A classifier's artifact as one file, ONNX or a TensorRT engine, for its target or one that takes its integers."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from penjing.compress.export.convert import convert
from penjing.compress.export.record import ExportRecord, Form, publish_file, source_of
from penjing.compress.export.tensorrt_engine import build_engine, check_machine, run_engine
from penjing.compress.export.tensorrt_rules import check_tensorrt
from penjing.compress.parity.classifier import ClassifierParity
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx import recorded
from penjing.core.artifact.onnx_classifier import (
    ClassifierArtifact,
    logit_difference,
    normalised,
    open_classifier_artifact,
    recorded_images,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Difference, gate
from penjing.core.errors import InputError
from penjing.core.files import writing
from penjing.core.progress import Progress
from penjing.core.runtime.onnx_runtime import check_external_data

TENSORRT: TargetName = "tensorrt"


def export_classifier(
    folder: Path, form: Form, out: Path, target: TargetName | None, _: bool, progress: Progress
) -> ExportRecord:
    """Write the artifact in `folder` to `out` after what is written passed the artifact's parity gate here.

    Args:
        target: None takes the artifact's own.

    Raises:
        ConfigError: the artifact's integers are not for `target`.
        InputError: damaged, or beyond the parity bound.
        SetupError: TensorRT or a GPU is missing.
    """
    artifact = open_classifier_artifact(folder)
    wanted = TENSORRT if form == "tensorrt" else target or _own_target(artifact)
    data, notes = _onnx(artifact, wanted)
    image = (artifact.config.model.in_channels, *artifact.config.image_size)
    if form == "tensorrt":
        check_machine(folder, out, image)
    progress.start("parity", 1)
    options = TARGETS[wanted].session_options
    quantization = artifact.quantization.model_copy(update={"target": wanted, "session_options": options})
    with TemporaryDirectory() as scratch, writing(Path(scratch)):
        file = Path(scratch) / MODEL_FILE
        file.write_bytes(data)
        differences = ClassifierParity.compare(artifact, file, quantization)
    record = ExportRecord(
        form=form,
        target=wanted,
        **source_of(folder),
        session_options=options,
        differences=differences,
        bound=artifact.parity.bound,
        unmeasured=artifact.parity.unmeasured if wanted == TENSORRT else {},
        notes=notes,
    )
    if form == "tensorrt":
        data = build_engine(data, image)
        record = record.model_copy(
            update={"differences": (*differences, _in_tensorrt(artifact, data)), "unmeasured": {}}
        )
    progress.advance()
    publish_file(out, record, lambda partial: partial.write_bytes(data))
    return record


def _own_target(artifact: ClassifierArtifact) -> TargetName:
    for name in TARGETS:
        if name == artifact.quantization.target:
            return name
    raise InputError(
        f"{artifact.folder} is for the target {artifact.quantization.target!r}; this penjing knows {', '.join(TARGETS)}"
    )


def _onnx(artifact: ClassifierArtifact, target: TargetName) -> tuple[bytes, tuple[str, ...]]:
    """The checked ONNX file for `target`: the artifact's own bytes where it is for that."""
    path = artifact.folder / MODEL_FILE
    check_external_data(path)
    data, notes = path.read_bytes(), ()
    model = onnx.load_from_string(data)
    if target != artifact.quantization.target:
        notes = convert(model, artifact.quantization, target)
        data = model.SerializeToString()
    if target == TENSORRT:
        check_tensorrt(model)
    return data, notes


def _in_tensorrt(artifact: ClassifierArtifact, plan: bytes) -> Difference:
    """The parity gate in the engine itself."""
    record = artifact.parity
    logits = run_engine(plan, normalised(recorded_images(record), artifact.config))
    found = logit_difference((FAKE_QUANTIZED, TENSORRT), recorded(record, FAKE_QUANTIZED), logits)
    gate([found], record.bound.of(TENSORRT), ClassifierParity.hint)
    return found
