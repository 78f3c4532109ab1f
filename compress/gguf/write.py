"""A decoder artifact as GGUF for llama.cpp: INT8 layers as Q8_0, 4-bit layers as `four_bits` has them, with the
artifact's own integers.

Q8_0 stores 32 values a block with a float16 scale. A row's scale is repeated for each of its blocks, so the integers
are those of the artifact; only scales are rounded, to 11 bits (small ones to 9). Activations are llama.cpp's affair: it
rounds them to 8 bits block by block where the artifact's own runtime does so token by token. Source: the GGUF
specification (ggml-org/ggml, docs/gguf.md); `core/gguf/file.py` reads the same back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.compress.gguf.architecture import architecture_fields, architecture_of, rotary_divisors
from penjing.compress.gguf.four_bits import four_bit_blocks, near_halves
from penjing.compress.gguf.tokenizer import tokenizer_fields
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.files import check_room
from penjing.core.gguf.names import ANY, PAIRED, expert_of, gguf_name_of
from penjing.core.progress import Progress
from penjing.core.runtime.embedding import stored_table
from penjing.core.runtime.schemes import has_int8_embedding

BLOCK = 32
EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
BESIDE = ("_scale", "_shape", "_step", "_offset", "_channel")  # ends of what belongs to a weight
# Subnormal, but within 2⁻⁹ of a float16: SmolLM2's first v_proj, its norm folded in, has 2.4e-5.
SMALLEST_SCALE = 2.0**-16
FILE_TYPES = {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K": 15}  # general.file_type: what most of the bytes are


def write_gguf(checkpoint: Checkpoint, out: Path, progress: Progress) -> None:
    """Write the network and tokenizer of an artifact to `out`, a name that is not yet final.

    Raises:
        InputError: damaged, or a network or tokenizer that is not written as GGUF (named).
    """
    import gguf

    config, source = checkpoint.config, str(checkpoint.folder)
    _check_blocks(checkpoint)  # before minutes of work
    fields = architecture_fields(config, source) | tokenizer_fields(checkpoint.folder, config)
    writer = gguf.GGUFWriter(out, architecture_of(config, source))
    for key, value in fields.items():
        _add(writer, key, value)
    progress.start("writing GGUF", len(checkpoint.tensor_names))
    sizes = dict.fromkeys(FILE_TYPES, 0)
    for name, data, kind in _tensors(checkpoint):
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
    _check_written(checkpoint, out)


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


def _check_written(checkpoint: Checkpoint, path: Path) -> None:
    """Read the file with the gguf package: every tensor is as it was made of the artifact.

    Raises:
        InputError: names the first tensor that is not; it lies in bad memory or on a bad disk, or is a bug here.
    """
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, written, _ in _tensors(checkpoint):
        tensor = tensors.get(name)
        if tensor is None or tensor.data.shape != written.shape or (tensor.data != written).any():
            raise InputError(f"{path}: {name} does not read back as it was written; export again to another disk")


def q8_0(weight: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(rows, K) int8 and (rows,) → (rows, K / 32 · 34) bytes of Q8_0 blocks: float16 scale, 32 integers.

    Raises:
        InputError: K is no multiple of 32, or a scale is too large or too small for float16.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise InputError(f"a layer has {columns} inputs; Q8_0 needs a multiple of {BLOCK}: prune with round_to = 32")
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.isfinite(halves).all() or (scale < SMALLEST_SCALE).any():
        raise InputError(
            f"scales of {scale.min():g} … {scale.max():g} are too large or too small for float16, as Q8_0 stores them: "
            "export --to onnx or compressed-tensors keeps them as they are"
        )
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    blocks[:, :, :2] = halves.view(np.uint8).reshape(rows, 1, 2)
    blocks[:, :, 2:] = weight.view(np.uint8).reshape(rows, columns // BLOCK, BLOCK)
    return blocks.reshape(rows, -1)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, NDArray[Any], Any]]:
    """Name in the file, bytes and type of every tensor, one at a time."""
    import gguf

    for name, divisors in rotary_divisors(checkpoint.config).items():
        yield name, divisors, gguf.GGMLQuantizationType.F32
    turned = architecture_of(checkpoint.config, str(checkpoint.folder)) in PAIRED
    tied = has_int8_embedding(checkpoint.quantization) and checkpoint.config.tie_word_embeddings
    for name in checkpoint.tensor_names:
        if name.endswith(BESIDE):
            continue
        if tied and name in (EMBEDDING, FINAL_NORM):
            yield gguf_name_of(name), *_without_smoothing(checkpoint, name)
            continue
        if name.endswith("_packed"):
            name = name.removesuffix("_packed")
        stacked, expert = expert_of(name)
        if expert is None:
            yield gguf_name_of(name), *_tensor(checkpoint, name, turned)
        elif expert == 0:
            yield gguf_name_of(name), *_experts(checkpoint, stacked)


def _without_smoothing(checkpoint: Checkpoint, name: str) -> tuple[NDArray[Any], Any]:
    """The table of embedding and LM head, or the last norm, as before the norm divided what the head reads."""
    import gguf
    from gguf.quants import quantize

    table = stored_table(checkpoint.get, tied=True)
    assert table.channel_E is not None  # a tied one has it
    if name == FINAL_NORM:
        return (checkpoint.get(name).float() / table.channel_E).numpy(), gguf.GGMLQuantizationType.F32
    kind, rows = gguf.GGMLQuantizationType.Q8_0, torch.arange(len(table.weight_VE)).split(8192)
    if table.weight_VE.shape[1] % BLOCK:
        raise InputError(f"rows of {table.weight_VE.shape[1]} channels are no blocks of {BLOCK}, which Q8_0 needs")
    return np.concatenate([quantize(table.rows(part).numpy(), kind) for part in rows]), kind


def _experts(checkpoint: Checkpoint, stacked: str) -> tuple[NDArray[Any], Any]:
    """(experts, rows, …) bytes of the experts of a layer, whose names have ANY for their number, and their type."""
    assert checkpoint.config.moe is not None
    names = [stacked.replace(ANY, str(index)) for index in range(checkpoint.config.moe.num_experts)]
    parts = [_tensor(checkpoint, name, False) for name in names]
    if len(kinds := {kind for _, kind in parts}) > 1:
        raise InputError(
            f"{checkpoint.folder}: of the experts {stacked} some are in INT8 and some are not, and GGUF has one type "
            "for all of them; quantize all, or keep all"
        )
    return np.stack([data for data, _ in parts]), kinds.pop()


def _tensor(checkpoint: Checkpoint, name: str, turned: bool) -> tuple[NDArray[Any], Any]:
    import gguf

    four, config = f"{name}_packed" in checkpoint.tensor_names, checkpoint.config
    weight = checkpoint.get(f"{name}_packed" if four else name)
    order = torch.arange(weight.shape[0])
    if turned and ".self_attn." in name and name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        order = order.view(heads, 2, -1).transpose(1, 2).reshape(-1)  # rotated halves → interleaved pairs
    weight = weight[order]
    if four:
        ends = [end for end in ("scale", "offset", "step") if f"{name}_{end}" in checkpoint.tensor_names]
        scale, *offset = (checkpoint.get(f"{name}_{end}")[order].to(torch.float32).numpy() for end in ends)
        if f"{name}_step" in checkpoint.tensor_names:  # whole numbers on top of the scale of a row
            scale, offset = near_halves(scale * offset[1]), [near_halves(scale * offset[0])]
        said = f"{checkpoint.folder}: {name}"
        data, kind = four_bit_blocks(weight.contiguous().numpy(), scale, offset[0] if offset else None, said)
        return data, gguf.GGMLQuantizationType[kind]
    if weight.dtype == torch.int8:
        scale = checkpoint.get(f"{name}_scale").to(torch.float32).flatten()[order]
        return q8_0(weight.contiguous().numpy(), scale.numpy()), gguf.GGMLQuantizationType.Q8_0
    if name.endswith(".shared_expert_gate.weight"):
        weight = weight.flatten()
    if weight.dim() == 1 or name.endswith(".mlp.gate.weight"):  # a router chooses by small differences
        return weight.to(torch.float32).numpy(), gguf.GGMLQuantizationType.F32
    halves = weight.to(torch.float16)
    if not torch.isfinite(halves).all():
        raise InputError(
            f"{checkpoint.folder}: {name} holds {float(weight.abs().max()):g}, beyond float16, as GGUF stores what is "
            "not in INT8; export --to onnx or compressed-tensors keeps it as it is"
        )
    return halves.numpy(), gguf.GGMLQuantizationType.F16


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
