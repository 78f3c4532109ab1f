"""ONNX files of decoders: ONNX Runtime computes what was fake-quantized, from a cache and in padded batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from penjing.compress.decoder.parity import fake_quantized_logits
from penjing.compress.decoder_onnx.graph import MODEL_FILE, write_decoder_onnx
from penjing.compress.decoder_onnx.linear import ZERO
from penjing.compress.decoder_onnx.runtime import DecoderSession, greedy
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from tests.core.artifact.int8_artifact import above_zero_points, quantization_config, write_int8_artifact
from tests.core.runtime.test_fused import CONFIGS

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "window": {"model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 4},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "hadamard": {"model_type": "penjing", "mlp_hadamard": 32},
}
FOLDED = ("turned table", "gemma", "gemma2", "olmo", "hunyuan", "still", "neox", "arcee", "opt", "sub-norms", "sinks")
FOLDED += ("trinity", "laguna")
VARIANTS |= {name: CONFIGS[name] for name in FOLDED}


def exported(folder: Path, out: Path, target: TargetName) -> DecoderSession:
    out.mkdir()
    checkpoint = open_checkpoint(folder)
    write_decoder_onnx(checkpoint, target, out, Silent())
    return DecoderSession(out / MODEL_FILE, checkpoint.config, TARGETS[target].session_options)


def tokens(count: int, seed: int = 5) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def read(session: DecoderSession, ids: list[int]) -> torch.Tensor:
    logits, _, _ = session.step(np.array([ids]), np.ones((1, len(ids)), np.int64), session.start(1))
    return torch.from_numpy(logits[0])


@pytest.mark.parametrize("target", ["onnxruntime-avx2", "onnxruntime-cpu"])
@pytest.mark.parametrize("variant", [*VARIANTS, "above", "blocks above"])
def test_logits_are_those_of_the_fake_quantized_model(
    variant: str, target: TargetName, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    wide = (
        {"intermediate_size": 600} if variant == "blocks above" else {}
    )  # three blocks of inputs, the last a short one
    source, quantization = make_tiny_checkpoint(**VARIANTS.get(variant, wide)), None
    if variant.endswith("above"):
        groups = above_zero_points("re:.*down_proj", "re:.*[qkv]_proj")
        quantization = quantization_config(["lm_head"], config_groups=groups)
    head = variant == "llama"
    folder = write_int8_artifact(source, tmp_path / "int8", quantize_head=head, quantization=quantization)
    session = exported(folder, tmp_path / "onnx", target)
    ids = tokens(40)
    found = read(session, ids)
    expected = fake_quantized_logits(open_checkpoint(folder), torch.tensor([ids]))[0]
    gaps = (found - expected).abs()
    # A value on a rounding edge may fall to the other side, and then a token differs by a step of INT8.
    assert gaps.median() < 1e-5
    assert gaps.mean() < 0.01 * expected.std()
    assert gaps.max() < 0.5 * expected.std()


def test_greedy_tokens_from_the_cache_are_the_engine_s(tiny_int8: Path, tmp_path: Path) -> None:
    session = exported(tiny_int8, tmp_path / "onnx", "onnxruntime-avx2")
    model = load_model(tiny_int8).model
    for seed in range(3):
        made = prompt = tokens(9, seed)
        with torch.no_grad():
            for _ in range(12):
                made = [*made, int(model(torch.tensor([made]))[0, -1].argmax())]
        assert greedy(session, prompt, 12) == made[9:]


def test_a_padded_batch_in_pieces_equals_each_prompt_alone(tiny_int8: Path, tmp_path: Path) -> None:
    session = exported(tiny_int8, tmp_path / "onnx", "onnxruntime-avx2")
    long, short = tokens(12, 1), tokens(7, 2)
    ids = np.array([long, [0] * 5 + short])
    mask = np.array([[1] * 12, [0] * 5 + [1] * 7])
    cache, parts = session.start(2), []
    for begin, end in ((0, 6), (6, 11), (11, 12)):
        logits, cache, _ = session.step(ids[:, begin:end], mask[:, :end], cache)
        parts.append(torch.from_numpy(logits))
    both = torch.cat(parts, 1)
    assert cache["past_key_values.0.key"].shape == (2, 2, 12, 16)
    for row, alone in ((both[0], long), (both[1, 5:], short)):
        torch.testing.assert_close(row, read(session, alone), rtol=1e-3, atol=1e-3)
    assert np.isfinite(both.numpy()).all()  # the padding's own rows too


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_tokens_of_zeros_and_extremes_are_quantized_as_the_kernel_does(
    scale: float, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "model.embed_tokens.weight":
            tensor = tensor.clone()
            tensor[7] *= scale
        return tensor

    folder = write_int8_artifact(tiny_checkpoint, tmp_path / "int8", quantize_head=True, change=change)
    session = exported(folder, tmp_path / "onnx", "onnxruntime-avx2")
    ids = [7, 9, 7, 11]
    expected = fake_quantized_logits(open_checkpoint(folder), torch.tensor([ids]))[0]
    found = read(session, ids)
    assert torch.equal(found.isfinite(), expected.isfinite())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_the_signed_form_needs_its_session_option_or_vnni_and_the_other_nothing(
    tiny_int8: Path, tmp_path: Path
) -> None:
    integers = {}
    for target, kind in (("onnxruntime-avx2", np.uint8), ("onnxruntime-cpu", np.int8)):
        exported(tiny_int8, tmp_path / target, target)  # type: ignore[arg-type]
        model = onnx.load(str(tmp_path / target / MODEL_FILE))
        assert model.opset_import[0].version >= 21
        constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        weight = constants["model.layers.0.mlp.up_proj.weight"]
        assert weight.dtype == kind
        integers[target] = weight.astype(np.int16) - (ZERO if kind is np.uint8 else 0)
        kinds = [node.op_type for node in model.graph.node]
        assert kinds.count("MatMulInteger") == 15
        assert kinds.count("QuantizeLinear") == 2 * 4 + 1  # q, k and v read one input, gate and up another
    assert np.array_equal(integers["onnxruntime-avx2"], integers["onnxruntime-cpu"])
    assert TARGETS["onnxruntime-avx2"].session_options == {}


def test_export_writes_a_folder_with_its_record(
    tiny_int8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "onnx"
    assert _run(["export", str(tiny_int8), str(out), "--to", "onnx"]) == 0
    assert "onnxruntime against fake_quantized, layer_outputs: mean" in capsys.readouterr().err
    names = {path.name for path in out.iterdir()}
    assert {"model.onnx", "config.json", "tokenizer.json", "export.json"} <= names
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    record = json.loads((out / "export.json").read_text())
    layers, answers = record["differences"]
    assert layers["mean"] < 1e-4 < record["bound"]["value"]
    assert answers["same"] == 1.0
    assert _run(["export", str(tiny_int8), str(out), "--to", "onnx"]) == 3
    assert "already exists" in capsys.readouterr().err
    assert _run(["export", str(tiny_int8), str(out), "--to", "onnx", "--target", "onnxruntime-cpu", "--force"]) == 0
    assert json.loads((out / "export.json").read_text())["session_options"] == {"session.x64quantprecision": "1"}


def test_an_export_beyond_the_bound_is_refused_and_nothing_is_left(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from penjing.compress.export import decoder

    def write_wrong(checkpoint: Any, target: TargetName, folder: Path, progress: Any) -> None:
        write_decoder_onnx(checkpoint, target, folder, progress)
        model = onnx.load(str(folder / MODEL_FILE))
        for constant in model.graph.initializer:
            if constant.name == "model.layers.1.mlp.down_proj.weight_scale":
                constant.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(constant), constant.name))
        onnx.save(model, str(folder / MODEL_FILE))

    monkeypatch.setattr(decoder, "write_decoder_onnx", write_wrong)
    assert _run(["export", str(tiny_int8), str(tmp_path / "onnx"), "--to", "onnx"]) == 3
    assert "parity: onnxruntime differs from fake_quantized" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variant", "what"), [("conv", "conv_taps=3"), ("lfm3", "conv_taps=7"), ("apertus", "activation=xielu")]
)
def test_layers_that_the_graph_has_not_are_refused_by_name(
    variant: str, what: str, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    folder = write_int8_artifact(make_tiny_checkpoint(**CONFIGS[variant]), tmp_path / "int8")
    with pytest.raises(InputError, match=f"has {what}.*, which is not written as ONNX"):
        exported(folder, tmp_path / "onnx", "onnxruntime-avx2")
    assert not any((tmp_path / "onnx").iterdir())


def test_what_cannot_be_expressed_is_refused(
    tiny_int8: Path, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="TensorRT takes constant scales"):
        write_decoder_onnx(open_checkpoint(tiny_int8), "tensorrt", tmp_path, Silent())
    with pytest.raises(InputError, match="is not quantized"):
        write_decoder_onnx(open_checkpoint(tiny_checkpoint), "onnxruntime-cpu", tmp_path, Silent())
    for arguments, code, message in (
        (["--to", "tensorrt"], 3, "is a decoder, which is not written as tensorrt"),
        (["--to", "onnx", "--target", "tensorrt"], 2, "TensorRT takes constant scales"),
        (["--to", "gguf", "--target", "onnxruntime-cpu"], 2, "--target is for '--to onnx'"),
    ):
        assert _run(["export", str(tiny_int8), str(tmp_path / "x"), *arguments]) == code
        assert message in capsys.readouterr().err
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    for name in ("model.onnx", "quantization.json"):
        (encoder / name).write_text("{}")
    (encoder / "config.json").write_text('{"model_type": "bert"}')
    assert _run(["export", str(encoder), str(tmp_path / "x"), "--to", "gguf"]) == 3
    assert "is a text encoder, which is not written as gguf" in capsys.readouterr().err
    shutil.rmtree(encoder)
    assert _run(["export", str(tiny_int8), str(tiny_int8 / "onnx"), "--to", "onnx"]) == 3
    assert "lies in the artifact" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_smollm2_s_greedy_tokens_are_the_engine_s_where_its_choice_is_clear(smollm2_int8: Path, tmp_path: Path) -> None:
    loaded = load_model(smollm2_int8)
    session = exported(smollm2_int8, tmp_path / "onnx", "onnxruntime-avx2")
    compared = 0
    for text in (
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Water boils at",
        "The three primary colours are",
    ):
        ids = loaded.tokenizer.encode(text)
        ids += greedy(session, ids, 12)
        with torch.no_grad():
            engine = loaded.model(torch.tensor([ids]))[0].topk(2)
        found = read(session, ids).argmax(-1)
        clear = (engine.values[:, 0] - engine.values[:, 1]) > 2  # INT8 itself moves logits by 0.3 on average
        assert torch.equal(found[clear], engine.indices[clear, 0])
        compared += int(clear.sum())
    assert compared > 20
