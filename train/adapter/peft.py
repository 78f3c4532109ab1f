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
from penjing.train.state.state import check_finite

_SETTINGS, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
_BASE = "penjing_base"  # a key that PEFT passes over: the hash of the base's weights
# Settings by which PEFT computes something else than W + (alpha / r) B A, and what they are where it does not.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),  # others change the base
} | {
    name: (None, False, [], {})
    for name in (
        "use_dora", "use_rslora", "use_qalora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern",
        "alpha_pattern", "layer_replication", "target_parameters", "trainable_token_indices",
        "alora_invocation_tokens",
    )
}  # fmt: skip


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
        InputError: missing or damaged, or not of finite numbers.
    """
    settings = read_json_object(folder / _SETTINGS)
    others = {name: settings.get(name) for name, plain in _PLAIN.items() if settings.get(name) not in plain}
    if others:
        said = ", ".join(f"{name} = {json.dumps(value):.60}" for name, value in others.items())
        raise ConfigError(
            f"adapter.initial = {folder} is no plain LoRA adapter, which is all that is read: it has {said}"
        )
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
            tensors = {name.removeprefix(_PREFIX): reader.get_tensor(name) for name in list(reader.keys())}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{folder / _TENSORS} cannot be read ({error}); get the adapter again") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{folder / _TENSORS}: {name} is of {kind}, not of floating-point numbers; get it again")
        tensors[name] = tensor.float()
    check_finite(tensors, f"adapter.initial = {folder}")
    return tensors
