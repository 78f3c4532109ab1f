"""Writes small GGUF files with the gguf package's own writer, as llama.cpp's converter lays models out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penjing.core.models.config import DecoderConfig

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from rotated halves to interleaved pairs, as the converter does for `llama`."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    fields: dict[str, Any],
    *,
    arch: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write `path`; `fields` is tokenizer metadata, `metadata` adds to or (with None) takes from the rest."""
    writer = gguf.GGUFWriter(path, arch)
    values: dict[str, Any] = {
        "general.name": "tiny",
        "general.license": "apache-2.0",
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_theta),
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
    }
    values |= {key: value for key, value in fields.items() if key != "general.architecture"}
    for key, value in (values | (metadata or {})).items():
        add(writer, key, value)
    for name, tensor in tensors:
        weight = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            weight = permute(weight, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            weight = permute(weight, config.num_key_value_heads)
        kind = quantization if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(weight), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
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


def transformers_model(path: Path) -> Any:
    """The model as transformers reads it from GGUF. (Its `from_pretrained(gguf_file=…)` would need accelerate.)"""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model = AutoModelForCausalLM.from_config(config)
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model.eval()
