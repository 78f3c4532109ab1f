"""A decoder's artifact in the forms that other engines read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.compress.export import compressed_tensors
from penjing.compress.export import gate as decoder_gate
from penjing.compress.export.decoder_runtime import read_layers
from penjing.compress.export.onnx_decoder import write_decoder_onnx
from penjing.compress.export.record import RECORD_FILE, ExportRecord, Form, publish_file, source_of, write_record
from penjing.compress.gguf.architecture import context_length
from penjing.compress.gguf.write import BLOCK, write_gguf
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.core.artifact.decoder import DecoderArtifact, open_decoder_artifact
from penjing.core.artifact.onnx import ONNX_RUNTIME
from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.progress import Progress
from penjing.core.runtime.schemes import INT8_FORMAT, has_int8_embedding, offset_group

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
    artifact = open_decoder_artifact(folder)
    quantization = artifact.checkpoint.quantization
    _check_four_bits(folder, form, quantization)
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


def _check_four_bits(folder: Path, form: Form, quantization: dict[str, Any] | None) -> None:
    group = offset_group(quantization)
    if group and form != "gguf":
        raise InputError(
            f"{folder} has 4-bit weights with offsets, which are not written as {form}: export --to gguf, or compress "
            "with offsets=false"
        )
    if group not in (0, BLOCK):
        raise InputError(
            f"{folder} has offsets for groups of {group} inputs, and GGUF's Q4_1 has groups of {BLOCK}: compress with "
            f"group={BLOCK}"
        )
    four = quantization is not None and quantization.get("format") != INT8_FORMAT
    if four and not group and form != "compressed-tensors":
        raise InputError(
            f"{folder} has 4-bit weights, which are not written as {form}: export --to compressed-tensors, or compress "
            "with weights_bits=8"
        )


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
    why = compressed_tensors.EXPERTS if artifact.checkpoint.config.moe is not None else compressed_tensors.NOT_INSTALLED
    if why == compressed_tensors.EXPERTS or not compressed_tensors.can_read():
        return record.model_copy(update={"unmeasured": {compressed_tensors.LOADER: why}})
    progress.start("parity", 1)
    readings = compressed_tensors.read_sequences(partial, decoder_gate.sequences(artifact))
    differences = decoder_gate.measure(artifact, compressed_tensors.LOADER, readings)
    progress.advance()
    return record.model_copy(update={"differences": differences})


def _gguf(artifact: DecoderArtifact, out: Path, progress: Progress) -> ExportRecord:
    config = artifact.checkpoint.config
    shorter = context_length(config) < config.max_position_embeddings
    cut = f"the context is cut to the window of {context_length(config)} tokens: llama.cpp has no windows here"
    rounded = "the table of embedding and LM head is rounded once more: to blocks of 32, without the smoothing"
    table = has_int8_embedding(artifact.checkpoint.quantization) and config.tie_word_embeddings
    record = ExportRecord(
        form="gguf",
        **source_of(artifact.checkpoint.folder),
        unmeasured={"llama.cpp": "it is not part of penjing; the gguf package read the file back"},
        notes=(
            "integers are the artifact's, scales rounded to float16",
            "llama.cpp rounds activations to 8 bits block by block, not token by token",
            *((cut,) if shorter else ()),
            *((rounded,) if table else ()),
        ),
    )
    publish_file(out, record, lambda partial: write_gguf(artifact.checkpoint, partial, progress))
    return record
