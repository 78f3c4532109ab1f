"""Weights of a torch module from a file: `.safetensors`, or `.pth` by torch's reader that runs no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penjing.core.errors import InputError, first_line

_NESTS = ("state_dict", "model_state_dict", "model", "net", "module", "ema", "state_dict_ema")
_PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")


def load_weights(module: nn.Module, path: Path) -> None:
    """Fill every parameter and buffer of `module` from `path`.

    Raises:
        InputError: missing, damaged, holding objects besides tensors, or of other names or shapes than the module's.
    """
    stored = _fitted(_read(path), module)
    own = module.state_dict()
    missing = sorted(set(own) - set(stored))
    held = {_place(own[name]) for name in stored if name in own}  # `safetensors.torch.save_model` keeps a tied one once
    missing = [name for name in missing if not name.endswith("num_batches_tracked") and _place(own[name]) not in held]
    extra = sorted(set(stored) - set(own))
    if missing or extra:
        said = [
            f"{len(names)} {what} ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"
            for names, what in ((missing, "are missing"), (extra, "are not the module's"))
            if names
        ]
        raise InputError(
            f"{path} does not fit {type(module).__name__}: of {len(own)} weights {' and '.join(said)}; build "
            "the module with the settings that it was trained with"
        )
    for name, value in stored.items():
        if value.shape != own[name].shape:
            raise InputError(
                f"{path} does not fit {type(module).__name__}: {name} has the shape {list(value.shape)}, the module's "
                f"{list(own[name].shape)}; build the module with the settings that it was trained with"
            )
    module.load_state_dict(stored, strict=False)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Equal for two names of one tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        held: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise InputError(f"{path} is not a complete safetensors file ({error}); get it again") from None
    except Exception as error:  # torch raises many kinds for what is damaged or holds more than tensors
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise InputError(
                f"{path} holds objects besides tensors, which penjing does not load; save the weights alone: "
                "torch.save(model.state_dict(), path), or as safetensors"
            ) from None
        raise InputError(f"{path} is no file of weights ({first_line(error)}); get it again") from None
    return _flat(held, path)


def _flat(held: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(3):
        if not isinstance(held, dict):
            break
        nested = next((held[key] for key in _NESTS if isinstance(held.get(key), dict)), None)
        if nested is None or any(isinstance(value, Tensor) for value in held.values()):
            break
        held = nested
    if not isinstance(held, dict) or not held or not all(isinstance(value, Tensor) for value in held.values()):
        raise InputError(f"{path} holds no weights by name; save them with torch.save(model.state_dict(), path)")
    return {str(name): value for name, value in held.items()}


def _fitted(stored: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Without the prefix that wrappers (data parallelism, compilation) put before every name."""
    own = set(module.state_dict())
    for _ in range(2):
        if own & set(stored):
            break
        prefix = next((one for one in _PREFIXES if all(name.startswith(one) for name in stored)), None)
        if prefix is None:
            break
        stored = {name.removeprefix(prefix): value for name, value in stored.items()}
    return stored
