"""A decoder artifact as GGUF for llama.cpp: INT8 layers as Q8_0 with the artifact's own integers.

Q8_0 stores 32 values a block with a float16 scale. A row's scale is repeated for each of its blocks, so the integers
are those of the artifact; only scales are rounded, to 11 bits (small ones to 9). Activations are llama.cpp's affair: it
rounds them to 8 bits block by block where the artifact's own runtime does so token by token. Sources: the GGUF
specification (ggml-org/ggml, docs/gguf.md); `core/imports/gguf.py` and `gguf_tokenizer.py` read the same back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.files import check_room
from penjing.core.manifest import read_json_object
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import Progress

BLOCK = 32
Q8_0_FILE = 7  # general.file_type: mostly Q8_0
SMALLEST_SCALE = (
    2.0**-16
)  # subnormal, but within 2⁻⁹ of a float16: SmolLM2's first v_proj, its norm folded in, has 2.4e-5
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_WRITTEN = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    "bos_token_id", "eos_token_ids", "pad_token_id",
}  # fmt: skip
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def write_gguf(folder: Path, out: Path, progress: Progress) -> None:
    """Write the artifact in `folder` to `out`, a name that is not yet final.

    Raises:
        InputError: damaged, or a network or tokenizer that is not written as GGUF (named).
    """
    import gguf

    artifact = open_decoder_artifact(folder)
    checkpoint, config = artifact.checkpoint, artifact.checkpoint.config
    _check(config, folder)
    fields = _architecture(config) | _tokenizer(folder, config)
    writer = gguf.GGUFWriter(out, "llama")
    for key, value in fields.items():
        _add(writer, key, value)
    names = [name for name in checkpoint.tensor_names if not name.endswith("_scale")]
    progress.start("writing GGUF", len(names))
    for name in names:
        data, kind = _tensor(checkpoint, name, config)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
        progress.advance()
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


def _check_written(checkpoint: Checkpoint, path: Path) -> None:
    """Read the file with the gguf package: every tensor is as it was made of the artifact.

    Raises:
        InputError: names the first tensor that is not; it lies in bad memory or on a bad disk, or is a bug here.
    """
    import gguf

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in checkpoint.tensor_names:
        if name.endswith("_scale"):
            continue
        written, _ = _tensor(checkpoint, name, checkpoint.config)
        tensor = tensors.get(_gguf_name(name))
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


def _tensor(checkpoint: Checkpoint, name: str, config: DecoderConfig) -> tuple[NDArray[Any], Any]:
    import gguf

    weight = checkpoint.get(name)
    order = torch.arange(weight.shape[0])
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        order = order.view(heads, 2, -1).transpose(1, 2).reshape(-1)  # rotated halves → interleaved pairs
    weight = weight[order]
    if weight.dtype == torch.int8:
        scale = checkpoint.get(f"{name}_scale").to(torch.float32).flatten()[order]
        return q8_0(weight.contiguous().numpy(), scale.numpy()), gguf.GGMLQuantizationType.Q8_0
    if weight.dim() == 1:
        return weight.to(torch.float32).numpy(), gguf.GGMLQuantizationType.F32
    return weight.to(torch.float16).numpy(), gguf.GGMLQuantizationType.F16


def _check(config: DecoderConfig, folder: Path) -> None:
    """Refuse what GGUF's `llama` has no metadata for: every field but those written must be as it is by default.

    Raises:
        InputError: names the first such field.
    """
    if config.model_type != "llama":
        raise InputError(f"{folder} is a {config.model_type}; only llama networks are written as GGUF")
    for name, field in DecoderConfig.model_fields.items():
        if name not in _WRITTEN and getattr(config, name) != field.default:
            raise InputError(
                f"{folder}: {name}={getattr(config, name)} is not written as GGUF; plain llama networks are"
            )


def _architecture(config: DecoderConfig) -> dict[str, Any]:
    return {
        "general.quantization_version": 2,
        "general.file_type": Q8_0_FILE,
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_theta),
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
    }


def _tokenizer(folder: Path, config: DecoderConfig) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer.

    Raises:
        InputError: another kind of tokenizer.
    """
    values = read_json_object(folder / "tokenizer.json")
    model, splitter = values.get("model", {}), values.get("pre_tokenizer") or {}
    kinds = [part.get("type") for part in splitter.get("pretokenizers", [splitter])]
    pre = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}.get(tuple(kinds))
    if model.get("type") != "BPE" or pre is None:
        raise InputError(
            f"{folder}: a {model.get('type')} tokenizer that splits by {kinds} is not written as GGUF; byte-level BPE "
            "of GPT-2 or SmolLM is"
        )
    tokens = {index: token for token, index in model["vocab"].items()}
    types = dict.fromkeys(tokens, _NORMAL)
    for added in values.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = _CONTROL if added.get("special") else _USER_DEFINED
    if sorted(tokens) != list(range(config.vocab_size)):
        raise InputError(
            f"{folder}: {len(tokens)} tokens for {config.vocab_size} rows of the embedding; GGUF needs as many"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    template = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "padding_token_id": config.pad_token_id,
    }
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[index] for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [types[index] for index in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        **{f"tokenizer.ggml.{key}": value for key, value in ids.items() if value is not None},
        **({"tokenizer.chat_template": template} if isinstance(template, str) else {}),
    }


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


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
