"""A decoder artifact as GGUF for llama.cpp: INT8 layers as Q8_0, 4-bit layers as `four_bits` has them, with the
artifact's own integers.

Q8_0 stores 32 values a block with a float16 scale. A row's scale is repeated for each of its blocks, so the integers
are those of the artifact; only scales are rounded, to 11 bits (small ones to 9). Activations are llama.cpp's affair: it
rounds them to 8 bits block by block where the artifact's own runtime does so token by token. Source: the GGUF
specification (ggml-org/ggml, docs/gguf.md); `core/gguf/file.py` reads the same back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.gguf.architecture import Written, written_as
from penjing.compress.gguf.blocks import BLOCK
from penjing.compress.gguf.tensors import BESIDE, WrittenTensors
from penjing.compress.gguf.tokenizer import tokenizer_fields
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.files import check_room
from penjing.core.progress import Progress

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K": 15}  # general.file_type: what most of the bytes are


def write_gguf(checkpoint: Checkpoint, out: Path, progress: Progress) -> None:
    """Write the network and tokenizer of an artifact to `out`, a name that is not yet final.

    Raises:
        InputError: damaged, or a network or tokenizer that is not written as GGUF (named).
    """
    import gguf

    config, source = checkpoint.config, str(checkpoint.folder)
    _check_blocks(checkpoint)  # before minutes of work
    tensors = _first_that_holds(checkpoint, written_as(config, source))
    fields = tensors.written.fields | tokenizer_fields(checkpoint.folder, config)
    writer = gguf.GGUFWriter(out, tensors.written.architecture.name)
    for key, value in fields.items():
        _add(writer, key, value)
    progress.start("writing GGUF", len(checkpoint.tensor_names))
    sizes = dict.fromkeys(FILE_TYPES, 0)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
        sizes[kind.name] = sizes.get(kind.name, 0) + data.nbytes
        progress.advance()
    writer.add_file_type(FILE_TYPES[max(FILE_TYPES, key=lambda kind: sizes[kind])])
    check_room(out, sum(tensor.nbytes for part in writer.tensors for tensor in part.values()))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        if error.errno is None:  # numpy's tofile tells that it wrote less, and not why: one more write does
            with open(out, "ab") as file:
                file.write(bytes(1 << 16))
        raise
    _check_written(tensors, out)


def _first_that_holds(checkpoint: Checkpoint, written: list[Written]) -> WrittenTensors:
    """The tensors as the first of `written` that has a place for all of them.

    Raises:
        InputError: none has; what the first one lacks.
    """
    errors: list[InputError] = []
    for each in written:
        try:
            return WrittenTensors(checkpoint, each)
        except InputError as error:
            errors.append(error)
    raise errors[0]


def _check_blocks(checkpoint: Checkpoint) -> None:
    """Refuse INT8 rows that are no whole blocks of Q8_0, by sizes alone.

    Raises:
        InputError: names the first tensor that has such.
    """
    for name in checkpoint.tensor_names:
        if not name.endswith(BESIDE) and checkpoint.dtype(name) == "I8" and checkpoint.shape(name)[-1] % BLOCK:
            raise InputError(
                f"{checkpoint.folder}: {name} has rows of {checkpoint.shape(name)[-1]} numbers; Q8_0 needs a multiple "
                f"of {BLOCK}: prune with round_to = {BLOCK}"
            )


def _check_written(made: WrittenTensors, path: Path) -> None:
    """Read the file with the gguf package: every tensor is as it was made of the artifact.

    Raises:
        InputError: names the first tensor that is not; it lies in bad memory or on a bad disk, or is a bug here.
    """
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, written, _ in made:
        tensor = tensors.get(name)
        if tensor is None or tensor.data.shape != written.shape or (tensor.data != written).any():
            raise InputError(f"{path}: {name} does not read back as it was written; export again to another disk")


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
