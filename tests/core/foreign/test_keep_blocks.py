"""Integers of GGUF files: read as the gguf package dequantizes them, kept in an artifact, and written again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penjing.compress.exports import export_artifact
from penjing.compress.gguf.write import write_gguf as write_ours
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.foreign.gguf_blocks import read_blocks
from penjing.core.gguf.file import GgufFile
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from penjing.core.runtime.quantized import dequantized
from penjing.core.runtime.schemes import quantized_modules
from penjing.serve.runner.load import load_engine
from tests.compress.gguf.artifacts import make_int8
from tests.conftest import random_tensors, tiny_config, tiny_tokenizer_fields
from tests.core.gguf.gguf_files import write_gguf
from tests.core.imports.test_importer import Recorder
from tests.serve.tiny import generate

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # whole blocks of 256
IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))


def blocks(rows: int, count: int, kind: str, seed: int = 0) -> NDArray[np.uint8]:
    """(rows, bytes): random blocks with small scales."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (rows, count, size)).astype(np.uint8)
    place = size - 2 if kind == "Q6_K" else 0
    halves = 1 if kind in ("Q4_0", "Q8_0", "Q6_K") else 2
    scale = generator.uniform(1e-4, 2e-4, (rows, count, halves)).astype(np.float16)
    data[..., place : place + 2 * halves] = scale.view(np.uint8).reshape(rows, count, 2 * halves)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0"])
def test_blocks_are_what_the_gguf_package_makes_of_them(kind: str) -> None:
    data = blocks(5, 3, kind)
    found = read_blocks(torch.from_numpy(data), kind)
    assert found is not None
    weight = found.code_NK.float() * found.scale_NG.float().repeat_interleave(32, dim=1)
    if found.offset_NG is not None:
        weight += found.offset_NG.float().repeat_interleave(32, dim=1)
    wanted = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert torch.equal(weight, torch.from_numpy(np.array(wanted)))


def test_a_scale_whose_offset_float16_does_not_hold_is_widened() -> None:
    data = blocks(1, 1, "Q4_0")
    data[0, :2] = np.array([60000], np.float16).view(np.uint8)
    found = read_blocks(torch.from_numpy(data), "Q4_0")
    assert found is not None
    assert found.finite()
    assert found.offset_NG is not None
    assert found.offset_NG.item() == -480000


def is_kept(file: Path, out: Path) -> Path:
    """Import `file` with its integers; whatever becomes of a weight, its value is that of the gguf package."""
    import_model(str(file), out, keep_integers=True)
    assert read_manifest(out).kind == "artifact"
    checkpoint = open_checkpoint(out)
    assert checkpoint.quantization is not None
    weights = dict(GgufFile(file).tensors())
    linear = [name.removesuffix(".weight") for name in weights if name.endswith(("_proj.weight", "lm_head.weight"))]
    schemes = quantized_modules(checkpoint.quantization, linear)
    assert schemes
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        scheme = schemes.get(module) if name.endswith(".weight") else None
        found = checkpoint.get(name) if scheme is None else dequantized(module, scheme, checkpoint.get)
        assert torch.equal(found, weight), name
    return out


@pytest.mark.parametrize(("arch", "kind"), [("llama", "Q4_0"), ("llama", "Q4_1"), ("qwen2", "Q4_0")])
def test_layers_of_32_keep_their_integers_and_run(tmp_path: Path, arch: str, kind: str) -> None:
    config = tiny_config(**({"model_type": "qwen2", "attention_bias": True} if arch == "qwen2" else {}))
    file, fields = tmp_path / "tiny.gguf", tiny_tokenizer_fields()
    quantization = gguf.GGMLQuantizationType[kind]
    write_gguf(file, config, random_tensors(config), fields, arch=arch, quantization=quantization)
    out = is_kept(file, tmp_path / "kept")
    recorder = Recorder()
    import_model(str(file), out, keep_integers=True, progress=recorder)
    assert "already holds" in recorder.notes[0]
    import_model(str(file), out, keep_integers=True, force=True, progress=recorder)
    assert recorder.notes[1].startswith(
        f"GGUF: 14 layers of 4 bits ({kind}) keep their integers, the embedding ({kind}"
    )
    assert recorder.done == recorder.total
    floating = load_model(import_model(str(file), tmp_path / "floating")).model(IDS)
    assert (load_model(out).model(IDS) - floating).square().mean().sqrt() < 0.1 * floating.std()
    assert len(generate(load_engine(out), [5, 6, 7], max_tokens=3, ignore_eos=True)) == 3


def mixed(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as llama.cpp mixes kinds: Q4_K, values in Q6_K, the embedding in Q8_0."""
    config, write = tiny_config(**WIDE), gguf.GGUFWriter.add_tensor

    def add(writer: gguf.GGUFWriter, name: str, data: Any, raw_dtype: Any = None, **more: Any) -> None:
        if data.ndim == 2:
            kind = "Q6_K" if "attn_v" in name else "Q8_0" if "embd" in name else "Q4_K"
            size = gguf.GGML_QUANT_SIZES[raw_dtype := gguf.GGMLQuantizationType[kind]][0]
            data = blocks(len(data), data.shape[1] // size, kind, len(name))
        write(writer, name, data, raw_dtype=raw_dtype, **more)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return write_gguf(path, config, random_tensors(config), tiny_tokenizer_fields())


def test_kinds_that_do_not_fit_become_floating_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = mixed(tmp_path / "mixed.gguf", monkeypatch)
    out, recorder = is_kept(file, tmp_path / "kept"), Recorder()
    import_model(str(file), out, keep_integers=True, force=True, progress=recorder)
    assert recorder.notes[0].startswith(
        "GGUF: 12 layers of 4 bits (Q4_K) keep their integers, 2 layers (Q6_K) are made float32, the embedding (Q8_0) "
        "is made float32; activations will be rounded to 8 bits with a scale for each group of 32 inputs"
    )
    export_artifact(out, "gguf", tmp_path / "again.gguf", force=False, progress=Silent())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "again.gguf").tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {kinds["blk.0.attn_q.weight"], kinds["blk.1.ffn_down.weight"]} == {"Q4_K"}
    assert kinds["blk.0.attn_v.weight"] == "F16"
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.tensor_type.name == "Q4_K":
            again = gguf.dequantize(tensors[tensor.name].data, gguf.GGMLQuantizationType.Q4_K)
            assert np.array_equal(again, gguf.dequantize(tensor.data, tensor.tensor_type)), tensor.name


def test_rows_of_one_scale_stay_in_8_bits(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make_int8(tmp_path / "artifact", tiny_checkpoint, tie_word_embeddings=False)
    write_ours(open_checkpoint(tmp_path / "artifact"), tmp_path / "ours.gguf", Silent())
    out, recorder = is_kept(tmp_path / "ours.gguf", tmp_path / "kept"), Recorder()
    import_model(str(tmp_path / "ours.gguf"), out, keep_integers=True, force=True, progress=recorder)
    assert "GGUF: 15 layers in Q8_0 keep theirs, with a scale a channel" in recorder.notes[0]
    before, after = open_checkpoint(tmp_path / "artifact"), open_checkpoint(out)
    for name in before.tensor_names:
        if before.dtype(name) == "I8":
            assert torch.equal(before.get(name), after.get(name)), name
    assert load_model(out).scheme == "int8"


def test_a_file_without_such_layers_becomes_floating_and_says_why(tmp_path: Path) -> None:
    config = tiny_config()
    kind, recorder = gguf.GGMLQuantizationType.Q8_0, Recorder()
    file = write_gguf(tmp_path / "q8.gguf", config, random_tensors(config), tiny_tokenizer_fields(), quantization=kind)
    out = import_model(str(file), tmp_path / "out", keep_integers=True, progress=recorder)
    assert read_manifest(out).kind == "checkpoint"
    assert (
        "made float32, because no layer is in Q4_0, Q4_1 or Q4_K, nor in Q8_0 with one scale a row" in recorder.notes[0]
    )


def test_bad_input_is_refused_by_name(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no .gguf file: leave --keep-integers out"):
        import_model(str(tiny_checkpoint), tmp_path / "out", keep_integers=True)
    config, kind = tiny_config(), gguf.GGMLQuantizationType.Q4_1
    file = write_gguf(tmp_path / "bad.gguf", config, random_tensors(config), tiny_tokenizer_fields(), quantization=kind)
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_up.weight")
    content = bytearray(file.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = np.array([np.inf], np.float16).tobytes()
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"layers.1.mlp.up_proj.weight has scales that are NaN or infinite"):
        import_model(str(file), tmp_path / "out", keep_integers=True)
    assert not (tmp_path / "out").exists()
