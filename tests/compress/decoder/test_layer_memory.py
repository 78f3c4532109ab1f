"""Calibration holds one layer and the hidden states of the text: its memory does not follow the depth of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.settings import Int8Settings, Transform
from penjing.compress.samples.data import DataSettings, token_samples
from penjing.core.progress import Silent
from penjing.core.work import WorkFolder

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
    model = make_tiny_checkpoint(num_hidden_layers=24, **WIDE)
    model_bytes = (model / "model.safetensors").stat().st_size
    settings = Int8Settings(transform=Transform(search_steps=2))
    windows_WT = token_samples(model, DataSettings(tokens=128, window=64), Silent()).windows
    with WorkFolder(tmp_path / "int8", "key") as work:
        artifact, records = make_weights(model, settings, windows_WT, work, Silent())
        layers = [record for record in records if record.name.startswith("layer_")]
        assert len(layers) == 24
        assert (artifact / "model.safetensors").exists()
        late = max(record.peak_memory_bytes for record in layers[4:])
        early = max(record.peak_memory_bytes for record in layers[:4])
        assert late < early + 0.15 * model_bytes, (early, late, model_bytes)
        kept = [name for name in range(23) if list(work.path.glob(f"hidden_{name:03d}*"))]
        assert kept == []  # off-loaded hidden states go once the next are there
