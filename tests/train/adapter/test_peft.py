"""Adapters that come in: what is damaged, of another shape or more than a plain LoRA adapter is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.decoder import Decoder
from penjing.train.adapter.lora import AdapterConfig, adapt, adapted_weights, check_adapter
from penjing.train.adapter.peft import load_adapter, save_adapter
from penjing.train.state.initial import checkpoint_weights, fill_weights

CONFIG = AdapterConfig(rank=4, alpha=8.0)
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapted(base: Path, adapter: Path | None, config: AdapterConfig = CONFIG) -> Decoder:
    """The network of `base` with the adapter of a folder."""
    model = Decoder(open_checkpoint(base).config)
    adapt(model, config)
    known = None if adapter is None else load_adapter(adapter, config, base)
    if known is not None:
        check_adapter(known, model)
    fill_weights(model, adapted_weights(checkpoint_weights(base), 0, known))
    return model


@pytest.fixture
def adapter(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A good one."""
    parameters = dict(adapted(tiny_checkpoint, None).named_parameters())
    save_adapter(tmp_path / "adapter", parameters, CONFIG, tiny_checkpoint)
    return tmp_path / "adapter"


def change_settings(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(adapter: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({Q: torch.zeros(4, 3)}, ConfigError, r"has .*q_proj.lora_A.weight of shape \(4, 3\), .* \(4, 64\)"),
        ({Q: torch.zeros(4)}, ConfigError, r"of shape \(4,\)"),
        ({Q: torch.full((4, 64), float("nan"))}, InputError, "q_proj.lora_A.weight holds NaN or infinity"),
        ({Q: torch.full((4, 64), float("-inf"))}, InputError, "q_proj.lora_A.weight holds NaN or infinity"),
        ({Q: torch.ones(4, 64, dtype=torch.int32)}, InputError, "q_proj.lora_A.weight is of int32"),
        ({Q.replace("0.self", "7.self"): torch.zeros(4, 64)}, ConfigError, "also has .*layers.7.self_attn.q_proj"),
        ({"base_model.model.lm_head.weight": torch.zeros(2, 2)}, ConfigError, "also has lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    adapter: Path, tiny_checkpoint: Path, change: dict[str, Tensor], error: type[Exception], says: str
) -> None:
    change_tensors(adapter, lambda tensors: tensors.update(change))
    with pytest.raises(error, match=says) as raised:
        adapted(tiny_checkpoint, adapter)
    assert "\n" not in str(raised.value)


def test_an_adapter_of_more_layers_than_the_recipe_names_is_not_cut(adapter: Path, tiny_checkpoint: Path) -> None:
    few = CONFIG.model_copy(update={"targets": ("*.q_proj",)})
    with pytest.raises(ConfigError, match=r"also has .*_proj.lora_.*set adapter.targets to its own"):
        adapted(tiny_checkpoint, adapter, few)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "ADALORA"},
        {"use_dora": True},
        {"use_rslora": True},
        {"use_qalora": True},
        {"fan_in_fan_out": True},
        {"bias": "all"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2.0}},
        {"layer_replication": [[0, 1]]},
        {"target_parameters": ["x"]},
        {"trainable_token_indices": [1]},
        {"alora_invocation_tokens": [1]},
        {"init_lora_weights": "pissa_niter_4"},
    ],
)
def test_what_computes_otherwise_than_a_plain_adapter_is_refused(
    adapter: Path, tiny_checkpoint: Path, changes: dict[str, Any]
) -> None:
    """Read as a plain one it would be another network, and nothing would say so."""
    change_settings(adapter, **changes)
    (name,) = changes
    with pytest.raises(ConfigError, match=f"is no plain LoRA adapter, .*{name} = "):
        load_adapter(adapter, CONFIG, tiny_checkpoint)


def test_settings_that_change_nothing_are_taken(adapter: Path, tiny_checkpoint: Path) -> None:
    """As PEFT writes them, with a dropout that is for training and an initialisation that left the base alone."""
    change_settings(
        adapter, lora_dropout=0.1, init_lora_weights=True, rank_pattern={}, alpha_pattern={}, modules_to_save=None,
        layers_to_transform=None, megatron_core="megatron.core", use_dora=False, bias="none", target_parameters=None,
    )  # fmt: skip
    tensors = load_adapter(adapter, CONFIG, tiny_checkpoint)
    change_settings(adapter, init_lora_weights="gaussian")
    change_tensors(adapter, lambda held: held.update({name: each.half() for name, each in held.items()}))
    again = load_adapter(adapter, CONFIG, tiny_checkpoint)
    assert all(torch.equal(again[name], each.half().float()) for name, each in tensors.items())


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"peft_type": "LORA", "r": ' + b"9" * 9999])
def test_damaged_files_are_one_error(adapter: Path, tiny_checkpoint: Path, content: bytes) -> None:
    whole = (adapter / "adapter_config.json").read_bytes()
    (adapter / "adapter_config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"adapter_config.json"):
        load_adapter(adapter, CONFIG, tiny_checkpoint)
    (adapter / "adapter_config.json").write_bytes(whole)
    tensors = (adapter / "adapter_model.safetensors").read_bytes()
    for damaged in (content, tensors[: len(tensors) // 2]):
        (adapter / "adapter_model.safetensors").write_bytes(damaged)
        with pytest.raises(InputError, match=r"adapter_model.safetensors cannot be read"):
            load_adapter(adapter, CONFIG, tiny_checkpoint)
