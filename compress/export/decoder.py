"""A decoder's artifact in the forms that other engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.compress.decoder_onnx.graph import write_decoder_onnx
from penjing.compress.decoder_onnx.runtime import read_layers
from penjing.compress.export import compressed_tensors
from penjing.compress.export import gate as decoder_gate
from penjing.compress.export.floating import BLIND, FLOATING, export_floating
from penjing.compress.export.record import RECORD_FILE, ExportRecord, Form, publish_file, source_of, write_record
from penjing.compress.export.weights_only import ZERO_POINTS, write_weights_only
from penjing.compress.gguf.architecture import context_length, written_as
from penjing.compress.gguf.write import write_gguf
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.decoder import DecoderArtifact, open_decoder_artifact, open_decoder_weights
from penjing.core.artifact.onnx import ONNX_RUNTIME
from penjing.core.checkpoint.decoder import Checkpoint, copy_tokenizer
from penjing.core.errors import InputError
from penjing.core.family import sees
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.progress import Progress
from penjing.core.runtime.schemes import INT8_FORMAT, has_int8_embedding, has_steps, offset_group

WEIGHTS_ONLY: Form = "compressed-tensors-weights"
FOLDERS: tuple[Form, ...] = ("onnx", "compressed-tensors", WEIGHTS_ONLY, FLOATING)
EXACT_EVERYWHERE: TargetName = "onnxruntime-avx2"  # the default: right with any session options, any processor


def export_decoder(
    folder: Path, form: Form, out: Path, target: TargetName | None, force: bool, progress: Progress
) -> ExportRecord:
    """Write the artifact in `folder` to `out`, a file for "gguf", else a folder, after it has passed its gate.

    Args:
        target: of "onnx"; None takes the form that is exact on every processor.

    Raises:
        InputError: damaged, beyond the parity bound, with a transform or 4-bit weights that the form has not, or `out`
            exists.
        SetupError: disk full, no permission.
    """
    if form == FLOATING:
        return export_floating(folder, out, force, progress)
    if not is_artifact(folder):
        raise InputError(
            f"{folder} is in floating point, and {form} is for artifacts, which 'penjing compress' makes; export --to "
            f"{FLOATING} writes it for transformers and vLLM as it is"
        )
    checkpoint, _ = open_decoder_weights(folder)
    _check_four_bits(folder, form, checkpoint.quantization)
    blocks = {"down": checkpoint.config.mlp_hadamard, "table": checkpoint.config.table_hadamard}
    if form != "onnx" and any(blocks.values()):
        settings = " and ".join(f"transform.hadamard_{name}=0" for name, block in blocks.items() if block)
        raise InputError(
            f"{folder} has a Hadamard transform, which {form} does not: penjing and its ONNX files compute it. For "
            f"another engine compress with {settings}"
        )
    if form == "gguf":
        return _gguf(checkpoint, out, progress)
    artifact = None if form == WEIGHTS_ONLY else open_decoder_artifact(folder)
    with publish_folder(out, replace=force, marker=RECORD_FILE) as partial:
        if artifact is None:
            record = _weights_only(checkpoint, partial, progress)
        else:
            make = _decoder_onnx if form == "onnx" else _compressed_tensors
            record = make(artifact, target or EXACT_EVERYWHERE, partial, progress)
        write_record(partial / RECORD_FILE, record)
    return record


def _check_four_bits(folder: Path, form: Form, quantization: dict[str, Any] | None) -> None:
    if form in ("gguf", WEIGHTS_ONLY):
        return
    if offset_group(quantization):
        raise InputError(
            f"{folder} has 4-bit weights with offsets, which {form} does not have: export --to gguf, or --to "
            f'{WEIGHTS_ONLY} if they were made with offsets="whole", or compress with offsets=false'
        )
    if form == "onnx" and quantization is not None and quantization.get("format") != INT8_FORMAT:
        forms = "compressed-tensors" if has_steps(quantization) else f"compressed-tensors, {WEIGHTS_ONLY}"
        raise InputError(
            f"{folder} has 4-bit weights, which are not written as onnx: export --to {forms} or gguf, or compress with "
            "weights_bits=8"
        )


def _blind(checkpoint: Checkpoint) -> tuple[str, ...]:
    return (BLIND,) if sees(checkpoint.folder) else ()


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
    return ExportRecord(
        form="onnx",
        target=target,
        **source_of(checkpoint.folder),
        session_options=options,
        differences=differences,
        bound=artifact.parity.bound.of(ONNX_RUNTIME),
        notes=(*_blind(checkpoint), *(() if options else ("weights have the zero point 128",))),
    )


def _compressed_tensors(artifact: DecoderArtifact, _: TargetName, partial: Path, progress: Progress) -> ExportRecord:
    compressed_tensors.write_compressed_tensors(artifact, partial)
    bound = artifact.parity.bound.of(compressed_tensors.LOADER)
    source = source_of(artifact.checkpoint.folder)
    record = ExportRecord(form="compressed-tensors", **source, bound=bound, notes=_blind(artifact.checkpoint))
    why = compressed_tensors.cannot_read(artifact.checkpoint)
    if why is not None:
        return record.model_copy(update={"unmeasured": {compressed_tensors.LOADER: why}})
    progress.start("parity", 1)
    readings = compressed_tensors.read_sequences(partial, decoder_gate.sequences(artifact))
    differences = decoder_gate.measure(artifact, compressed_tensors.LOADER, readings)
    progress.advance()
    return record.model_copy(update={"differences": differences})


def _weights_only(checkpoint: Checkpoint, partial: Path, progress: Progress) -> ExportRecord:
    zero_points = write_weights_only(checkpoint, partial)
    bound = decoder_gate.WEIGHTS_BOUND.of(compressed_tensors.LOADER)
    note = "activations stay in floating point, also where penjing rounds them to 8 bits"
    record = ExportRecord(
        form=WEIGHTS_ONLY, **source_of(checkpoint.folder), bound=bound, notes=(*_blind(checkpoint), note)
    )
    why = ZERO_POINTS if zero_points else compressed_tensors.cannot_read(checkpoint)
    if why is not None:
        return record.model_copy(update={"unmeasured": {compressed_tensors.LOADER: why}})
    progress.start("parity", 1)
    readings = compressed_tensors.read_sequences(partial, decoder_gate.prompt_ids(checkpoint))
    difference = decoder_gate.measure_weights(checkpoint, compressed_tensors.LOADER, readings)
    progress.advance()
    return record.model_copy(update={"differences": (difference,)})


def _gguf(checkpoint: Checkpoint, out: Path, progress: Progress) -> ExportRecord:
    config = checkpoint.config
    context = context_length(config, written_as(config, str(checkpoint.folder))[0].architecture)
    shorter = context < config.max_position_embeddings
    cut = f"the context is cut to the window of {context} tokens: llama.cpp has no windows here"
    rounded = "the table of embedding and LM head is rounded once more: to blocks of 32, without the smoothing"
    table = has_int8_embedding(checkpoint.quantization) and config.tie_word_embeddings
    four = "too where they were trained" if has_steps(checkpoint.quantization) else "are exact"
    record = ExportRecord(
        form="gguf",
        **source_of(checkpoint.folder),
        unmeasured={"llama.cpp": "it is not part of penjing; the gguf package read the file back"},
        notes=(
            *_blind(checkpoint),
            f"integers are the artifact's; scales of 8-bit layers are rounded to float16, those of 4 bits {four}",
            "llama.cpp rounds activations to 8 bits block by block, not token by token",
            *((cut,) if shorter else ()),
            *((rounded,) if table else ()),
        ),
    )
    publish_file(out, record, lambda partial: write_gguf(checkpoint, partial, progress))
    return record
