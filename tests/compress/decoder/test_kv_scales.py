"""Calibrated KV-cache scales in an artifact: what they are, that transformers reads them, that ours may not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penjing.compress.decoder.layer import LargestKV
from penjing.compress.run import run_recipe
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.models.attention import causal_attention
from penjing.core.text.corpus import calibration_windows
from tests.compress.conftest import write_recipe

pytestmark = pytest.mark.xdist_group("kv-scales")  # what all share is made once


@pytest.fixture(scope="module")
def with_scales(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    folder = tmp_path_factory.mktemp("kv")
    recipe = write_recipe(folder, tiny_checkpoint, folder / "int8")
    return run_recipe(recipe, ["steps.0.kv_cache=int8", "steps.0.transform.search_steps=4"])


def test_scales_span_what_the_artifact_caches_on_calibration_text(with_scales: Path) -> None:
    loaded = load_model(with_scales)
    windows = calibration_windows(loaded.tokenizer, 256, 64, 0.5)
    found: dict[int, list[float]] = {}
    causal = causal_attention(loaded.config)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        found[layer] = [float(k.abs().amax()), float(v.abs().amax())]
        return causal(layer, q, k, v, sinks)

    with torch.no_grad():
        loaded.model(windows, attend=replace(causal, attention=attend))
    for layer, largest in found.items():
        for name, value in zip(("k_scale", "v_scale"), largest, strict=True):
            stored = open_decoder_artifact(with_scales).checkpoint.get(f"model.layers.{layer}.self_attn.{name}")
            assert stored.shape == (1,)
            assert float(stored) * 127 == pytest.approx(value, rel=0.05)  # INT8 layers compute a little otherwise


def test_transformers_and_compressed_tensors_read_them(with_scales: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(with_scales, dtype=torch.float32).eval()
    stored = load_file(with_scales / "model.safetensors")
    for name in ("model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.v_scale"):
        assert torch.equal(theirs.get_parameter(name).flatten(), stored[name])
    assert (
        json.loads((with_scales / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    )


def test_the_weights_are_those_of_an_artifact_without(with_scales: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "plain")
    plain = run_recipe(recipe, ["steps.0.transform.search_steps=4"])
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(load_model(plain).model(ids), load_model(with_scales).model(ids))


@pytest.mark.parametrize("scale", [torch.zeros(1), torch.tensor([float("nan")]), torch.ones(2), torch.ones(1).int()])
def test_a_scale_that_is_none_is_refused(with_scales: Path, tmp_path: Path, scale: torch.Tensor) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in with_scales.iterdir():
        if path.is_file() and path.name != "penjing.json":
            (damaged / path.name).write_bytes(path.read_bytes())
    tensors = load_file(damaged / "model.safetensors") | {"model.layers.1.self_attn.v_scale": scale}
    save_file(tensors, damaged / "model.safetensors")
    with pytest.raises(InputError, match="one positive number"):
        load_model(damaged)


def test_smoothing_divides_values_head_by_head() -> None:
    largest = LargestKV()
    v = torch.randn(1, 5, 2, 4, generator=torch.Generator().manual_seed(0))
    largest.observe(torch.zeros_like(v), v)
    divided = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]).view(2, 1, 4).expand(2, 3, 4).flatten()
    scales = largest.scales(divided)
    assert float(scales["self_attn.k_scale"]) == 1
    wanted = (v[0] / divided.view(2, 3, 4)[:, 0]).abs().amax() / 127
    assert torch.equal(scales["self_attn.v_scale"], wanted.view(1))
