"""Calibration holds one layer and the hidden states of the text: its memory does not follow the depth of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.check import int8_needs, layer_needs
from penjing.compress.decoder.layer import compress_layer
from penjing.compress.decoder.settings import Int8Settings, Transform
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.samples.data import DataSettings, token_samples
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.progress import Silent
from penjing.core.work import WorkFolder
from tests.allocated import peak_bytes

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}


def test_the_peak_of_calibration_is_far_below_the_model(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_tiny_checkpoint(num_hidden_layers=12, **WIDE)
    model_bytes = (model / "model.safetensors").stat().st_size
    settings = Int8Settings(transform=Transform(search_steps=2))
    windows_WT = token_samples(model, DataSettings(tokens=128, window=64), Silent()).windows
    with WorkFolder(tmp_path / "int8", "key") as work:
        artifact, records = make_weights(model, settings, windows_WT, work, Silent())
        layers = [record for record in records if record.name.startswith("layer_")]
        assert len(layers) == 12
        assert (artifact / "model.safetensors").exists()
        late = max(record.peak_memory_bytes for record in layers[4:])
        early = max(record.peak_memory_bytes for record in layers[:4])
        assert late < early + 0.15 * model_bytes, (early, late, model_bytes)
        kept = [name for name in range(11) if list(work.path.glob(f"hidden_{name:03d}*"))]
        assert kept == []  # off-loaded hidden states go once the next are there


DEEP = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 2, "head_dim": 32}
EXPERTS = {
    "model_type": "mixtral",
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
}
FOUR = {"weights_bits": 4, "group": 32}


@pytest.mark.parametrize(
    ("model", "values", "tokens"),
    [
        (DEEP, {}, 64),
        (DEEP, {"rounding": "nearest"}, 64),
        (DEEP, FOUR, 64),
        (DEEP, FOUR | {"scales": "whole"}, 64),
        (DEEP, {"keep": ["*.down_proj"]}, 64),
        (DEEP, FOUR | {"offsets": True, "keep_int8": ["*.up_proj"]}, 64),
        (DEEP, {}, 4096),
        (DEEP | EXPERTS, {}, 512),
    ],
)
def test_the_estimate_of_a_layer_is_near_what_is_allocated(
    model: dict[str, Any], values: dict[str, Any], tokens: int, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    stream = LayerStream(open_checkpoint(make_tiny_checkpoint(num_hidden_layers=1, **model)))
    config = stream.config
    settings = Int8Settings.model_validate({"transform": {"rotate": False, "search_steps": 2}} | values)
    ids = torch.randint(0, config.vocab_size, (4, tokens // 4), generator=torch.Generator().manual_seed(0))
    hidden_WTE = stream.embed(ids)
    measured = peak_bytes(lambda: compress_layer(stream, 0, settings, None, hidden_WTE))
    assert 0.85 < layer_needs(settings, config, tokens) / measured < 1.25
    assert int8_needs(settings, config, tokens).memory >= layer_needs(settings, config, tokens)
