"""Files laid out as llama.cpp's converter does, with the names of the gguf package, keep the logits of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES
from torch import Tensor

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.gguf.file import GgufFile
from penjing.core.imports.importer import import_model
from tests.conftest import tiny_tokenizer_fields
from tests.core.folded.test_families import LONGROPE, save
from tests.core.gguf.gguf_files import add, permute

HALF = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
PERMUTED = ("smollm3", "arcee", "olmo", "granite")
TURNS = {"sliding_window": 12, "sliding_window_pattern": 4, "num_hidden_layers": 64, "hidden_size": 32}
SHORT = {name: LONGROPE[name][:3] for name in ("short_factor", "long_factor")}
# general.architecture → type in transformers, its settings, and the metadata that the converter writes besides
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("gemma", "gemma", {"head_dim": 16}, {}),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": 1.5, "attn_logit_softcapping": 2.0},
        {"attention.sliding_window": 12, "final_logit_softcapping": 1.5, "attn_logit_softcapping": 2.0},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": (
        "olmo2",
        "olmo3",
        {"sliding_window": 9},
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "smollm3": ("smollm3", "smollm3", {}, {}),
    "exaone4": ("exaone4", "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
    "exaone4 of 64 layers": ("exaone4", "exaone4", TURNS, {"attention.sliding_window": 12}),
    "glm4": ("glm4", "glm4", {"head_dim": 16, "rope_parameters": HALF}, {"rope.dimension_count": 8}),
    "phi3": ("phi3", "phi3", {"rope_parameters": HALF}, {"rope.dimension_count": 6}),
    "phi3 with a window": ("phi3", "phi3", {"sliding_window": 11}, {"attention.sliding_window": 11}),
    "phi3 longrope": (
        "phi3",
        "phi3",
        {
            "rope_parameters": LONGROPE | SHORT | {"partial_rotary_factor": 0.5},
            "original_max_position_embeddings": 64,
        },
        {
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": (1 + np.log(512 / 64) / np.log(64)) ** 0.5,
        },
    ),
    "command-r": ("command-r", "cohere", {"logit_scale": 0.5}, {"logit_scale": 0.5, "rope.scaling.type": "none"}),
    "cohere2": (
        "cohere2",
        "cohere2",
        {"sliding_window": 9, "logit_scale": 0.25},
        {"attention.sliding_window": 9, "logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}, {}),
    "gptneox": (
        "gptneox",
        "gpt_neox",
        {"num_key_value_heads": 4, "rope_parameters": HALF},
        {"rope.dimension_count": 6, "use_parallel_residual": True},
    ),
    "gptneox in turn": (
        "gptneox",
        "gpt_neox",
        {"num_key_value_heads": 4, "use_parallel_residual": False, "rope_parameters": HALF},
        {"rope.dimension_count": 6, "use_parallel_residual": False},
    ),
    "phi2": ("phi2", "phi", {"rope_parameters": HALF, "num_key_value_heads": 4}, {"rope.dimension_count": 6}),
    "stablelm": ("stablelm", "stablelm", {"use_qkv_bias": True, "rope_parameters": HALF}, {"rope.dimension_count": 6}),
    "nemotron": ("nemotron", "nemotron", {"head_dim": 12, "rope_parameters": HALF}, {"rope.dimension_count": 6}),
    "gpt2": ("gpt2", "gpt2", {"n_inner": 40, "num_key_value_heads": 4}, {}),
    "lfm2": (
        "lfm2",
        "lfm2",
        {"full_attn_idxs": [1, 3], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2]},
    ),
    "seed_oss": ("seed_oss", "seed_oss", {"head_dim": 16}, {}),
    "arcee": ("arcee", "arcee", {}, {}),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan_v1_dense", {"head_dim": 16}, {}),
    "olmo": ("olmo", "olmo", {}, {}),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"head_dim": 12}, {}),
    "chatglm": ("chatglm", "glm", {"head_dim": 12, "rope_parameters": HALF}, {"rope.dimension_count": 6}),
    "starcoder": (
        "starcoder",
        "gpt_bigcode",
        {"n_inner": 40},
        {"attention.head_count_kv": 1},
    ),
    "granite": (
        "granite",
        "granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2},
        {"embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.22, "attention.scale": 0.2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    architecture, kind, changes, said = CASES[case]
    reference = save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    convert(tmp_path / "tiny.gguf", architecture, reference, said)
    out = import_model(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        found = load_model(out).model(tokens)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5 * float(expected.abs().max()))


def convert(path: Path, architecture: str, model: Any, said: dict[str, Any]) -> None:
    """Write a network of transformers as llama.cpp's converter does."""
    config, arch = model.config, next(each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == architecture)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None) or config.n_inner
    eps = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps = next((value for name in eps if (value := getattr(config, name, None))), 1e-5)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    values: dict[str, Any] = {
        "block_count": layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads) or heads,
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.key_length": head_dim,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    writer = gguf.GGUFWriter(path, architecture)
    fields = tiny_tokenizer_fields() | {f"{architecture}.{key}": value for key, value in (values | said).items()}
    for key, value in fields.items():
        if key != "general.architecture":
            add(writer, key, value)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in tensors(model, architecture, heads, values["attention.head_count_kv"]):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(tensor.float().numpy()))
    for name, factors in rope.items():
        if name.endswith("_factor") and isinstance(factors, list):
            writer.add_tensor(f"rope_factors_{name.removesuffix('_factor')}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: Any, architecture: str, heads: int, key_heads: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a network of transformers, changed as the converter changes them."""
    for name, parameter in model.named_parameters():
        tensor, kind = parameter.detach(), name.rpartition(".")[2]
        if architecture in PLUS_ONE and "norm" in name and kind == "weight":
            tensor = tensor + 1
        if architecture in PERMUTED and ".q_proj." in name:
            tensor = torch.from_numpy(permute(tensor.numpy(), heads))
        if architecture in PERMUTED and ".k_proj." in name:
            tensor = torch.from_numpy(permute(tensor.numpy(), key_heads))
        if "attention.query_key_value" in name:  # each head has its queries, keys and values together
            tensor = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 2)
        if architecture == "gpt2" and ".h." in name and tensor.dim() == 2:
            tensor = tensor.t()
        yield name, tensor.squeeze(1) if "conv.conv" in name else tensor


def test_experts_that_an_architecture_has_not_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, "olmo2", {})
    convert(tmp_path / "tiny.gguf", "olmo2", reference, {"expert_count": 4, "expert_used_count": 2})
    with pytest.raises(InputError, match="experts of olmo2 are not supported"):
        GgufFile(tmp_path / "tiny.gguf")
