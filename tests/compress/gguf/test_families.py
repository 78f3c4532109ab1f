"""Networks of other families than Llama's as GGUF: which architecture they become, and that they come back the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.compress.decoder.check import linear_modules
from penjing.compress.decoder.weights import quantize_per_channel
from penjing.compress.gguf.write import write_gguf
from penjing.core.artifact.decoder import quantization_config
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint, save_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.progress import Silent
from tests.compress.gguf.artifacts import make_int8
from tests.compress.gguf.test_write import dequantized, is_close
from tests.core.folded.test_families import CASES, save
from tests.core.gguf.gguf_files import transformers_model

BECOMES = {  # case of `tests.core.folded` → general.architecture
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_scaled": "gemma3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmo": "llama",
    "smollm3": "smollm3",
    "exaone4_full": "exaone4",
    "glm": "phi3",
    "glm4": "glm4",
    "phi3_partial": "phi3",
    "phi3_longrope_partial": "phi3",
    "cohere2": "cohere2",
    "starcoder2_untied": "starcoder2",
    "gpt_neox": "gptneox",
    "gpt_neox_in_turn": "gptneox",
    "phi": "phi2",
    "stablelm": "stablelm",
    "nemotron": "nemotron",
    "nemotron_bias": "nemotron",
    "jais2": "nemotron",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt2",
    "gptj": "phi2",
    "falcon": "phi2",
    "falcon_new": "gptneox",
    "falcon_in_turn": "starcoder2",
    "lfm2": "lfm2",
    "seed_oss": "qwen2",
    "hunyuan": "hunyuan-dense",
    "hyperclovax": "glm4",
    "granitemoe": "llama",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "glm4moe",
    "hunyuan_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "exaone_moe": "exaone-moe",
    "lfm2_moe": "lfm2moe",
    "hy_v3": "glm4moe",
}
EXTRA: dict[str, tuple[str, dict[str, Any], str]] = {
    "cohere": ("cohere", {"logit_scale": 0.5}, "command-r"),
    "arcee": ("arcee", {}, "arcee"),
    "exaone4_turns": (
        "exaone4",
        {"sliding_window": 12, "sliding_window_pattern": 4, "num_hidden_layers": 64, "hidden_size": 32},
        "exaone4",
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}, "olmoe"),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 4},
        "gpt-oss",
    ),
    "gemma3_27b": ("gemma3_text", {"head_dim": 8, "num_hidden_layers": 62, "hidden_size": 32}, "gemma3"),
}
ALL = {name: (*CASES[name][:2], becomes) for name, becomes in BECOMES.items()} | EXTRA
TOKENS = torch.arange(48).view(1, -1) * 7 % 320


@pytest.mark.parametrize("case", ALL)
def test_what_is_imported_is_written_and_comes_back(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, architecture = ALL[case]
    save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    import_model(str(tmp_path / "hf"), tmp_path / "in")
    write_gguf(open_checkpoint(tmp_path / "in"), tmp_path / "model.gguf", Silent())
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["general.architecture"].contents() == architecture
    import_model(str(tmp_path / "model.gguf"), tmp_path / "back")
    with torch.no_grad():
        is_close(load_model(tmp_path / "back").model(TOKENS), load_model(tmp_path / "in").model(TOKENS), 2**-7)


# What its reader does not look at is as it assumes.
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {"head_dim": 256, "sliding_window": 4096}),
    "gemma3": ("gemma3_text", {"head_dim": 256, "sliding_window": 12, "num_hidden_layers": 7}),
    "starcoder2": CASES["starcoder2_untied"][:2],
    "gpt2": ("gpt2", {"n_positions": 1024, "max_position_embeddings": 1024, "num_key_value_heads": 4}),
    "lfm2": CASES["lfm2"][:2],
}


@pytest.mark.parametrize("case", READ)
def test_transformers_reads_the_same_network(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *READ[case])
    import_model(str(tmp_path / "hf"), tmp_path / "in")
    write_gguf(open_checkpoint(tmp_path / "in"), tmp_path / "model.gguf", Silent())
    with torch.no_grad():
        is_close(transformers_model(tmp_path / "model.gguf")(TOKENS).logits, reference(TOKENS).logits, 2**-7)


# Fields of small artifacts in INT8: factors, orders, windows and parts of a matrix in each.
ARTIFACTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "norms": "around",
        "qk_norm": True,
        "activation": "gelu_tanh",
        "num_hidden_layers": 7,
        "sliding_window": 12,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "layer_rotary": ["local"] * 5 + ["main", "local"],
        "rope_theta": 1e6,
    },
    "gemma2": {
        "norms": "around",
        "activation": "gelu_tanh",
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_cap": 2.0,
        "logit_cap": 1.5,
    },
    "olmo2": {"norms": "after", "qk_norm": True, "qk_norm_over": "all", "tie_word_embeddings": False},
    "phi3": {"rotary_pairs": 4, "attention_bias": True},
    "glm4": {"norms": "around", "rotary_pairs": 4},
    "smollm3": {"num_hidden_layers": 5, "layer_rotary": ["main"] * 3 + ["none", "main"]},
    "arcee": {"mlp_gated": False, "activation": "relu2"},
}


@pytest.mark.parametrize("architecture", ARTIFACTS)
def test_integers_are_the_artifact_s(architecture: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Factors of an embedding are in scales, orders of heads and parts of matrices move whole rows."""
    checkpoint = artifact(tmp_path / "artifact", tiny_checkpoint, architecture)
    write_gguf(checkpoint, tmp_path / "model.gguf", Silent())
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["general.architecture"].contents() == architecture
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {kinds[name] for name in kinds if ".attn_" in name and "norm" not in name and "bias" not in name} == {"Q8_0"}
    import_model(str(tmp_path / "model.gguf"), tmp_path / "back")
    with torch.no_grad():
        is_close(load_model(tmp_path / "back").model(TOKENS), dequantized(checkpoint)(TOKENS), 2**-8)
    kept = import_model(str(tmp_path / "model.gguf"), tmp_path / "kept", keep_integers=True)
    again, names = open_checkpoint(kept), 0
    for name in again.tensor_names:
        if again.dtype(name) == "I8":
            assert torch.equal(again.get(name), checkpoint.get(name)), name
            names += 1
    assert names >= 2 * 6


@pytest.mark.parametrize("case", ["cohere", "gpt_neox", "stablelm", "phi", "starcoder2_untied"])
def test_integers_of_a_centred_stream_leave_nearly_no_mean(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    """What rounding leaves of it the norms of llama.cpp subtract, and biases stand for what was there before."""
    kind, changes, architecture = ALL[case]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "n_inner": 96}
    save(tmp_path / "hf", tiny_checkpoint, kind, changes | sizes)
    source = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "in"))
    tensors: dict[str, torch.Tensor] = {}
    linears = {f"{module}.weight" for module in linear_modules(source.config)}
    for name in source.tensor_names:
        tensors[name] = source.get(name)
        if name in linears:
            quantized = quantize_per_channel(tensors[name])
            tensors |= {name: quantized.weight_NK, f"{name}_scale": quantized.scale_N1}
    (tmp_path / "artifact").mkdir()
    extra = {"quantization_config": quantization_config([])}
    save_checkpoint(
        tmp_path / "artifact", source.config, tensors.items(), tokenizer_from=source.folder, extra_config=extra
    )
    checkpoint = open_checkpoint(tmp_path / "artifact")
    write_gguf(checkpoint, tmp_path / "model.gguf", Silent())
    assert gguf.GGUFReader(tmp_path / "model.gguf").fields["general.architecture"].contents() == architecture
    import_model(str(tmp_path / "model.gguf"), tmp_path / "back")
    with torch.no_grad():
        is_close(load_model(tmp_path / "back").model(TOKENS), dequantized(checkpoint)(TOKENS), 2**-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": True, "tie_word_embeddings": False}, r"o_proj.weight adds a mean to the stream"),
        ({"table_hadamard": 32}, "table_hadamard=32, which llama has not"),
        ({"norms": "after"}, "norms=after"),
        ({"inner_norms": True}, "inner_norms=True"),
        ({"attention_sinks": True}, "attention_sinks=True"),
        ({"logit_cap": 3.0}, "logit_cap=3.0"),
        ({"rotary_pairs": 4, "qk_norm": True}, "rotary_pairs=4, which qwen3 has not"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    checkpoint = make_int8(tmp_path / "artifact", tiny_checkpoint, model_type="penjing", **fields)
    with pytest.raises(InputError, match=message):
        write_gguf(checkpoint, tmp_path / "model.gguf", Silent())


def test_an_lm_head_that_is_no_longer_the_embedding_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *EXTRA["cohere"][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "in")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] += 0.1 * torch.randn(tensors["lm_head.weight"].shape)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="an LM head that is not its embedding, which command-r"):
        write_gguf(open_checkpoint(folder), tmp_path / "model.gguf", Silent())


def artifact(folder: Path, tokenizer: Path, name: str) -> Checkpoint:
    return make_int8(folder, tokenizer, model_type="penjing", **ARTIFACTS[name])
