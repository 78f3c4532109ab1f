"""Adapters that are to be served: what is read, and what is refused by name before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.core.artifact.lora import BASE, AdapterFolder, base_hash
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from tests.core.artifact.adapters import adapter_tensors, write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
QB = Q.replace("_A.", "_B.")


def opened(base: Path, folder: Path) -> AdapterFolder:
    return AdapterFolder("alice", folder, open_checkpoint(base))


def test_it_is_read_as_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(tiny_checkpoint, of=("q_proj", "down_proj"))
    adapter = opened(tiny_checkpoint, write_adapter(tmp_path / "a", tensors))
    assert adapter.ranks == {
        f"model.layers.{layer}.{name}": 4 for layer in range(2) for name in ("mlp.down_proj", "self_attn.q_proj")
    }
    pairs = adapter.load()
    assert torch.equal(pairs["model.layers.0.self_attn.q_proj"].a_RK, tensors[Q])
    assert torch.equal(pairs["model.layers.0.self_attn.q_proj"].b_NR, tensors[QB])
    assert {pair.scale for pair in pairs.values()} == {2.0}
    assert {pair.a_RK.dtype for pair in adapter.load(torch.bfloat16).values()} == {torch.bfloat16}


def test_scales(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Of rank-stabilised LoRA it is alpha / √r (https://arxiv.org/abs/2312.03732)."""
    tensors = adapter_tensors(tiny_checkpoint)
    folder = write_adapter(tmp_path / "a", tensors, lora_alpha=3, use_rslora=True)
    assert opened(tiny_checkpoint, folder).scale == 1.5


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({Q: torch.zeros(4, 3)}, InputError, r"q_proj.lora_A has shape \[4, 3\], .* it has \[4, 64\]"),
        ({Q: torch.zeros(8, 64)}, InputError, r"with r = 4 it has \[4, 64\]"),
        ({Q: torch.zeros(4)}, InputError, r"shape \[4\]"),
        ({Q: torch.zeros(4, 64, dtype=torch.int32)}, InputError, "is I32, not F32, BF16, F16"),
        ({Q.replace("0.self", "7.self"): torch.zeros(4, 64)}, InputError, "layers.7.self_attn.q_proj.* beside no"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, InputError, "lm_head.* beside no"),
        ({"base_model.model.model.embed_tokens.weight": torch.zeros(4, 64)}, InputError, "embed_tokens.* beside no"),
        ({Q.removeprefix("base_model."): torch.zeros(4, 64)}, InputError, "beside no"),
    ],
)
def test_tensors_that_do_not_fit(
    tiny_checkpoint: Path, tmp_path: Path, change: dict[str, Tensor], error: type[Exception], says: str
) -> None:
    folder = write_adapter(tmp_path / "a", adapter_tensors(tiny_checkpoint) | change)
    with pytest.raises(error, match=says) as raised:
        opened(tiny_checkpoint, folder)
    assert "alice" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_half_a_pair(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(tiny_checkpoint)
    del tensors[QB]
    with pytest.raises(InputError, match=r"q_proj\.lora_B has nothing"):
        opened(tiny_checkpoint, write_adapter(tmp_path / "a", tensors))
    with pytest.raises(InputError, match="empty"):
        opened(tiny_checkpoint, write_adapter(tmp_path / "b", {}))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora = true"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"r": 0}, "r = 0"),
        ({"r": True}, "r = true"),
        ({"r": 10**9}, "r = 1000000000"),
        ({"lora_alpha": "8"}, 'lora_alpha = "8"'),
        ({"lora_alpha": None}, "lora_alpha = null"),
    ],
)
def test_settings_that_are_not_served(
    tiny_checkpoint: Path, tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    folder = write_adapter(tmp_path / "a", adapter_tensors(tiny_checkpoint), **settings)
    with pytest.raises((ConfigError, InputError), match=says):
        opened(tiny_checkpoint, folder)


def _pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_pickled, "is pickled"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\x80\x04"), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json.*give a folder with it"),
        (lambda folder: (folder / "adapter_config.json").write_text("["), "adapter_config.json"),
    ],
)
def test_damaged_folders(tiny_checkpoint: Path, tmp_path: Path, damage: Callable[[Path], Any], says: str) -> None:
    folder = write_adapter(tmp_path / "a", adapter_tensors(tiny_checkpoint))
    damage(folder)
    with pytest.raises(InputError, match=says):
        opened(tiny_checkpoint, folder)
    with pytest.raises(InputError, match="no such folder"):
        opened(tiny_checkpoint, tmp_path / "nowhere")


def test_numbers_that_are_not_finite(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tensors = adapter_tensors(tiny_checkpoint) | {Q: torch.full((4, 64), float("nan"))}
    with pytest.raises(InputError, match="q_proj holds NaN"):
        opened(tiny_checkpoint, write_adapter(tmp_path / "a", tensors)).load()


def test_an_adapter_of_other_weights(
    tiny_checkpoint: Path, make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    said: dict[str, Any] = {BASE: base_hash(tiny_checkpoint), "base_model_name_or_path": "build/tiny"}
    folder = write_adapter(tmp_path / "a", adapter_tensors(tiny_checkpoint), **said)
    assert opened(tiny_checkpoint, folder).scale == 2.0
    with pytest.raises(ConfigError, match=r"alice .* was trained beside build/tiny, and .* has other weights"):
        opened(make_tiny_checkpoint(seed=1), folder)
    assert json.loads((folder / "adapter_config.json").read_text())[BASE] == said[BASE]


def test_an_artifact_whose_inputs_were_moved(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Rotated and smoothed weights compute the same function, of other inputs than the adapter was trained on."""
    base = tmp_path / "int8"
    shutil.copytree(tiny_checkpoint, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"format": "int-quantized"}}))
    tensors = adapter_tensors(tiny_checkpoint)
    folder = write_adapter(tmp_path / "a", tensors)
    assert opened(base, folder).ranks
    (base / "recipe.toml").write_text(
        '[[steps]]\nkind = "quantize"\ntransform = {rotate = true, smooth_down = 0.6, smooth_norm = 0.0}\n'
    )
    with pytest.raises(ConfigError, match=r"alice .* by rotate, smooth_down of its recipe"):
        opened(base, folder)
    said: dict[str, Any] = {BASE: base_hash(base)}
    assert opened(base, write_adapter(tmp_path / "b", tensors, **said)).ranks
    (base / "recipe.toml").write_text("[[steps]]\ntransform = {rotate = false, smooth_down = 0.0, hadamard_down = 8}\n")
    assert opened(base, folder).ranks
    (base / "recipe.toml").write_text("[[")
    with pytest.raises(InputError, match=r"recipe\.toml cannot be read"):
        opened(base, folder)
