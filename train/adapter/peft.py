"""Adapters on disk, in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, sha256_file
from penjing.core.manifest import read_json_object
from penjing.train.adapter.lora import AdapterConfig

_SETTINGS, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_BASE = "penjing_base"  # a key that PEFT passes over: the hash of the base's weights


def base_hash(base: Path) -> str:
    """A hash of the weights in the folder `base`."""
    files = sorted(base.glob("*.safetensors"))
    return hashlib.sha256("".join(sha256_file(file) for file in files).encode()).hexdigest()


def save_adapter(folder: Path, parameters: Mapping[str, Tensor], config: AdapterConfig, base: Path) -> None:
    """Write the adapter among `parameters` into `folder`, part of a checkpoint that is not yet published."""
    folder.mkdir()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in parameters.items() if ".lora_" in name}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        # whole names, since a pattern may have chosen some layers only
        "target_modules": sorted({name.split(".lora_")[0] for name in tensors}),
        _BASE: base_hash(base),
    }
    atomic_write_text(folder / _SETTINGS, json.dumps(settings, indent=2) + "\n")
    save_tensors({f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}, folder / _TENSORS)


def load_adapter(folder: Path, config: AdapterConfig, base: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by their names in the model, in float32.

    Raises:
        ConfigError: its rank or alpha is not the recipe's, it is of another kind, or of another base.
        InputError: missing or damaged.
    """
    settings = read_json_object(folder / _SETTINGS)
    if settings.get("peft_type") != "LORA" or settings.get("use_dora") or settings.get("use_rslora"):
        raise ConfigError(f"adapter.initial = {folder} is no plain LoRA adapter; such are all that is read")
    for key, ours in (("r", config.rank), ("lora_alpha", config.alpha)):
        if settings.get(key) != ours:
            name = "rank" if key == "r" else "alpha"
            raise ConfigError(f"adapter.initial = {folder} has {key} = {settings.get(key)}; set adapter.{name} to it")
    if _BASE in settings and settings[_BASE] != base_hash(base):
        raise ConfigError(
            f"adapter.initial = {folder} was trained beside {settings.get('base_model_name_or_path')}, and initial = "
            f"{base} has other weights; give that checkpoint"
        )
    try:
        with safe_open(folder / _TENSORS, framework="pt") as reader:
            names = list(reader.keys())
            return {name.removeprefix(_PREFIX): reader.get_tensor(name).float() for name in names}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / _TENSORS} cannot be read ({error}); get the adapter again") from error
