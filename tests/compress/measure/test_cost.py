"""Sizes agree with inspection and with counting by hand; runtimes compute what torch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.compress.families.base import family_at
from penjing.compress.measure.cost import DecodeStep, MeasureSettings, onnx_session, sizes_of, timed
from penjing.compress.prune.inspect import inspect_network
from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.compress.samples.data import ImageData
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.models.resnet_config import cifar_resnet
from penjing.core.progress import Silent
from tests.compress.classifiers import MEAN, STD, made_up_images, write_classifier

QUICK = MeasureSettings(rounds=2, seconds=0, batches=(1, 3), prefill_tokens=8)


def size_of(folder: Path) -> dict[str, Any]:
    return sizes_of(folder, family_at(folder).skeleton(folder))


def measure(folders: list[Path], settings: MeasureSettings) -> list[dict[str, Any]]:
    latencies = timed(folders, family_at(folders[0]).calls, settings, Silent())
    return [size_of(folder) | {"latency": rows} for folder, rows in zip(folders, latencies, strict=True)]


def test_classifiers(tmp_path: Path) -> None:
    dense = write_classifier(tmp_path / "dense")
    narrow = write_classifier(tmp_path / "narrow", model=cifar_resnet(8, width=4, in_channels=1))
    first, second = measure([dense, narrow], QUICK)
    # stem, three blocks, two shortcuts, head: side² × kernel² × inputs × outputs
    convolutions = [(12, 3, 1, 8), *[(12, 3, 8, 8)] * 2, (6, 3, 8, 16), (6, 3, 16, 16), (6, 1, 8, 16)]
    convolutions += [(3, 3, 16, 32), (3, 3, 32, 32), (3, 1, 16, 32), (1, 1, 32, 10)]
    assert first["size"]["macs"] == sum(s**2 * k**2 * i * o for s, k, i, o in convolutions)
    weights = sum(k**2 * i * o for _, k, i, o in convolutions)
    assert first["size"]["parameters"] == weights + 2 * sum(o for _, _, _, o in convolutions[:-1]) + 10
    assert first["size"]["bytes"] == (dense / "model.safetensors").stat().st_size
    assert first["widths"]["blocks.1.layers.0.conv"] == 16 == 2 * second["widths"]["blocks.1.layers.0.conv"]
    assert [(row["runtime"], row["case"]) for row in first["latency"]] == [
        ("torch", "batch 1"),
        ("onnxruntime", "batch 1"),
        ("torch", "batch 3"),
        ("onnxruntime", "batch 3"),
    ]
    assert all(row["speedup"] == 1 for row in first["latency"])
    for row in second["latency"]:
        assert 0 < row["low"] <= row["seconds"] <= row["high"]
        assert row["runs"] == 2
    assert size_of(narrow) | {"latency": second["latency"]} == second


def test_a_quantized_classifier_runs_in_onnx_runtime_alone(tmp_path: Path) -> None:
    dense, int8 = write_classifier(tmp_path / "dense"), tmp_path / "int8"
    images = ImageData(made_up_images("train").first(64), (MEAN,), (STD,), 32)
    with publish_folder(int8) as partial:
        quantize_checkpoint(dense, partial, ArtifactSettings(parity_bound=10), images)
    first, second = measure([dense, int8], QUICK)
    assert [(row["runtime"], row["case"]) for row in second["latency"]] == [
        ("onnxruntime", "batch 1"),
        ("onnxruntime", "batch 3"),
    ]
    assert len(first["latency"]) == 4
    assert second["widths"] == first["widths"]
    assert second["size"]["macs"] == first["size"]["macs"]
    assert second["size"]["bytes"] == (int8 / "model.onnx").stat().st_size


def test_onnx_runtime_computes_what_torch_does(tmp_path: Path) -> None:
    model, _ = load_classifier(write_classifier(tmp_path / "dense"))
    session = onnx_session(model, torch.zeros(2, 1, 12, 12))
    images = torch.randn(5, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(images)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"images": images.numpy()})[0]), wanted)


def test_decoders(tiny_checkpoint: Path, make_tiny_checkpoint: Callable[..., Path], tiny_int8: Path) -> None:
    narrow = make_tiny_checkpoint(intermediate_size=48)
    first, second = measure([tiny_checkpoint, narrow], QUICK)
    inspected = inspect_network(tiny_checkpoint, family_at(tiny_checkpoint).skeleton(tiny_checkpoint), Silent())
    assert first["size"]["macs"] == inspected["macs"]
    assert first["size"]["macs"] - second["size"]["macs"] == 2 * 3 * 64 * 48
    assert second["widths"]["model.layers.1.mlp.up_proj"] == 48
    assert [row["case"] for row in first["latency"]] == ["prefill 8 tokens", "decode after 8 tokens"]
    int8 = size_of(tiny_int8)
    assert int8["size"]["macs"] == first["size"]["macs"]
    assert int8["size"]["bytes"] < first["size"]["bytes"]


def test_a_decode_step_equals_transformers(tiny_checkpoint: Path) -> None:
    prompt = torch.arange(10)[None] + 5
    found = DecodeStep(load_model(tiny_checkpoint).model, prompt)()
    reference = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(torch.cat([prompt, prompt[:, -1:]], 1)).logits[:, -1:]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_no_rounds_time_nothing(tiny_checkpoint: Path) -> None:
    (only,) = measure([tiny_checkpoint], MeasureSettings(rounds=0))
    assert only == size_of(tiny_checkpoint) | {"latency": []}


def test_what_cannot_be_measured_is_named(tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="context of 512 tokens, too few for prefill_tokens=512"):
        measure([tiny_checkpoint], MeasureSettings(prefill_tokens=512))
