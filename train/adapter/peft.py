"""Adapters on disk, in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penjing.core.artifact.lora import BASE, PREFIX, SETTINGS, TENSORS, base_hash, not_plain
from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object
from penjing.train.adapter.lora import AdapterConfig
from penjing.train.state.state import check_finite


def save_adapter(folder: Path, parameters: Mapping[str, Tensor], config: AdapterConfig, base: Path) -> None:
    """Write the adapter among `parameters` into `folder`, which is not yet published."""
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
        BASE: base_hash(base),
    }
    atomic_write_text(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")
    save_tensors({f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}, folder / TENSORS)


def load_adapter(folder: Path, config: AdapterConfig, base: Path) -> dict[str, Tensor]:
    """The tensors of an adapter by their names in the model, in float32.

    Raises:
        ConfigError: its rank or alpha is not the recipe's, it is of another kind, or of another base.
        InputError: missing or damaged, or not of finite numbers.
    """
    settings = read_json_object(folder / SETTINGS)
    if said := not_plain(settings):
        raise ConfigError(
            f"adapter.initial = {folder} is no plain LoRA adapter, which is all that is read: it has {said}"
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if (rank, alpha) != (config.rank, config.alpha):
        raise ConfigError(
            f"adapter.initial = {folder} has r = {rank} and lora_alpha = {alpha}; set adapter.rank and adapter.alpha "
            "to them"
        )
    if BASE in settings and settings[BASE] != base_hash(base):
        raise ConfigError(
            f"adapter.initial = {folder} was trained beside {settings.get('base_model_name_or_path')}, and initial = "
            f"{base} has other weights; give that checkpoint"
        )
    try:
        with safe_open(folder / TENSORS, framework="pt") as reader:
            tensors = {name.removeprefix(PREFIX): reader.get_tensor(name) for name in list(reader.keys())}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / TENSORS} cannot be read ({error}); get the adapter again") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{folder / TENSORS}: {name} is of {kind}, not of floating-point numbers; get it again")
        tensors[name] = tensor.float()
    check_finite(tensors, f"adapter.initial = {folder}")
    return tensors
