"""`penjing export`: an artifact in the form that another engine reads, which passes the parity gate there."""

from __future__ import annotations

import json
from pathlib import Path

from penjing.compress.export import compressed_tensors
from penjing.compress.export import gate as decoder_gate
from penjing.compress.export.classifier import export_classifier
from penjing.compress.export.decoder_runtime import read_layers
from penjing.compress.export.gguf import write_gguf
from penjing.compress.export.onnx_decoder import write_decoder_onnx
from penjing.compress.export.record import RECORD_FILE, ExportRecord, Form, publish_file, source_of, write_record
from penjing.compress.export.text_encoder import export_text_encoder
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.core.artifact.decoder import DecoderArtifact, open_decoder_artifact
from penjing.core.artifact.onnx import ONNX_RUNTIME
from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES, FamilyName, family_of
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.progress import Progress

FORMS: dict[FamilyName, tuple[Form, ...]] = {
    "classifier": ("onnx", "tensorrt"),
    "encoder": ("onnx",),
    "decoder": ("onnx", "compressed-tensors", "gguf"),
}
EXACT_EVERYWHERE: TargetName = "onnxruntime-avx2"  # a decoder's default: right with any session options, any processor


def export_artifact(
    folder: Path, form: Form, out: Path, *, target: TargetName | None = None, force: bool, progress: Progress
) -> ExportRecord:
    """Write the artifact in `folder` as `form` to `out`, which appears when it is complete and has passed its gate.

    "onnx" of a classifier or a text encoder, "tensorrt" and "gguf" are files, with a record beside them (`OUT.json`);
    "onnx" of a decoder and "compressed-tensors" are folders that hold it.

    Args:
        target: the engine that an ONNX file is for; None takes the artifact's own, for a decoder a form that is exact
            on every processor.

    Raises:
        ConfigError: the target cannot express the artifact, or the form has no targets.
        InputError: damaged, of a kind that has no such form, beyond its parity bound, or `out` exists.
        SetupError: TensorRT or a GPU is missing; disk full, no permission.
    """
    family = family_of(folder)
    forms = FORMS.get(family, ())
    if form not in forms:
        kind = FAMILIES.get(family, f"of the family {family!r}")
        known = f"{' and '.join(forms)} are its forms" if forms else "it has no forms"
        raise InputError(f"{folder} is {kind}, which is not written as {form}; {known}")
    if target is not None and form != "onnx":
        raise ConfigError(f"--target is for '--to onnx'; {form} has one form")
    if out.absolute().is_relative_to(folder.absolute()):
        raise InputError(f"{out} lies in the artifact, whose files are fixed by their hashes; choose another place")
    if family != "decoder" or form == "gguf":
        _check_file(out, force, form)
    if family == "encoder":
        return export_text_encoder(folder, out, target, progress)
    if family == "classifier":
        return export_classifier(folder, form, out, target, progress)
    artifact = open_decoder_artifact(folder)
    if form != "onnx" and artifact.checkpoint.config.mlp_hadamard:
        raise InputError(
            f"{folder} has a Hadamard transform, which {form} does not: penjing and its ONNX files compute it. For "
            "another engine compress with transform.hadamard_down=0"
        )
    if form == "gguf":
        return _gguf(artifact, out, progress)
    with publish_folder(out, replace=force, marker=RECORD_FILE) as partial:
        make = _decoder_onnx if form == "onnx" else _compressed_tensors
        record = make(artifact, target or EXACT_EVERYWHERE, partial, progress)
        write_record(partial / RECORD_FILE, record)
    return record


def _check_file(out: Path, force: bool, form: Form) -> None:
    if out.is_dir():
        name = {"tensorrt": "model.engine"}.get(form, f"model.{form}")
        raise InputError(f"{out} is a folder; give the name of the file to write, such as {out / name}")
    if file := next((parent for parent in out.absolute().parents if parent.is_file()), None):
        raise InputError(f"{file} is a file, so {out} cannot lie in it; choose another place")
    if out.exists() and not force:
        raise InputError(f"{out} already exists; replace it with --force, or choose another file")


def _decoder_onnx(artifact: DecoderArtifact, target: TargetName, partial: Path, progress: Progress) -> ExportRecord:
    checkpoint = artifact.checkpoint
    write_decoder_onnx(checkpoint, target, partial, progress)
    config = {key: value for key, value in checkpoint.config_json.items() if key != "quantization_config"}
    atomic_write_text(partial / "config.json", json.dumps(config, indent=2) + "\n")
    copy_tokenizer(checkpoint.folder, partial)
    progress.start("parity", 1)
    options = TARGETS[target].session_options
    readings = read_layers(partial, checkpoint.config, options, decoder_gate.sequences(artifact))
    differences = decoder_gate.measure(artifact, ONNX_RUNTIME, readings)
    progress.advance()
    notes = ("weights have the zero point 128",) if not options else ("without VNNI the session option is needed",)
    return ExportRecord(
        form="onnx",
        target=target,
        **source_of(checkpoint.folder),
        session_options=options,
        differences=differences,
        bound=artifact.parity.bound.of(ONNX_RUNTIME),
        notes=notes,
    )


def _compressed_tensors(artifact: DecoderArtifact, _: TargetName, partial: Path, progress: Progress) -> ExportRecord:
    compressed_tensors.write_compressed_tensors(artifact, partial)
    bound = artifact.parity.bound.of(compressed_tensors.LOADER)
    record = ExportRecord(form="compressed-tensors", **source_of(artifact.checkpoint.folder), bound=bound)
    if not compressed_tensors.can_read():
        return record.model_copy(update={"unmeasured": {compressed_tensors.LOADER: compressed_tensors.NOT_INSTALLED}})
    progress.start("parity", 1)
    readings = compressed_tensors.read_layers(partial, decoder_gate.sequences(artifact))
    differences = decoder_gate.measure(artifact, compressed_tensors.LOADER, readings)
    progress.advance()
    return record.model_copy(update={"differences": differences})


def _gguf(artifact: DecoderArtifact, out: Path, progress: Progress) -> ExportRecord:
    record = ExportRecord(
        form="gguf",
        **source_of(artifact.checkpoint.folder),
        unmeasured={"llama.cpp": "it is not part of penjing; the gguf package read the file back"},
        notes=(
            "integers are the artifact's, scales rounded to float16",
            "llama.cpp rounds activations to 8 bits block by block, not token by token",
        ),
    )
    publish_file(out, record, lambda partial: write_gguf(artifact.checkpoint.folder, partial, progress))
    return record


def print_export(out: Path, record: ExportRecord) -> None:
    """Say on standard error what was written, how far it is, and what it needs."""
    from rich.console import Console

    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.print(f"wrote {out} ({sum(path.stat().st_size for path in files) / 1e6:.1f} MB)")
    for each in record.differences:
        end = "" if each.same is None else f", {each.same:.1%} the same"
        console.print(f"  {each.between[1]} against {each.between[0]}, {each.quantity}: mean {each.mean:.2g}{end}")
    for name, reason in record.unmeasured.items():
        console.print(f"  {name}: not measured here: {reason}")
    for key, value in record.session_options.items():
        console.print(f"  session option {key} = {value}: exact integers on x64 processors without VNNI")
