"""Adapters in the format of PEFT (LoRA, https://arxiv.org/abs/2106.09685): small matrices beside those of a decoder.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Pickled ones are not read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penjing.core.artifact.base import RECIPE_FILE
from penjing.core.artifact.transform import LayerTransforms, read_transforms
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import sha256_file
from penjing.core.manifest import read_json_object
from penjing.core.models.tensor_names import tensor_shapes

SETTINGS, TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
BASE = "penjing_base"
"""A key of the settings that PEFT passes over: the hash of the base's weights."""
ORIGINALS = "originals"
"""A key of an artifact's manifest: such hashes of the checkpoints that it was made of."""
MOVED = "moved"
"""A key of a manifest: linear layers whose rows or factors an import changed, so that adapters of before do not fit."""
PICKLED = "adapter_model.bin"
MAX_RANK = 1024
_MOVES = ("rotate", "smooth_norm", "smooth_down", "smooth_output")  # of a recipe's transform: inputs and outputs
_PART = re.compile(r"(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
_LAYER = re.compile(r"model\.layers\.[0-9]+\.(self_attn\.[qkvgo]_proj|conv\.(in|out)_proj|mlp\.(gate|up|down)_proj)")
_TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Settings by which PEFT computes something else than W + (alpha / r) B A, and what they are where it does not.
PLAIN: Mapping[str, tuple[object, ...]] = {
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


def not_plain(settings: Mapping[str, Any], besides: tuple[str, ...] = ()) -> str:
    """What in the settings makes an adapter another kind than plain LoRA, in words; empty where nothing does."""
    others = {
        name: settings.get(name)
        for name, plain in PLAIN.items()
        if name not in besides and settings.get(name) not in plain
    }
    return ", ".join(f"{name} = {json.dumps(value):.60}" for name, value in others.items())


@dataclass(frozen=True)
class LoraPair:
    """Beside one linear layer (N, K): it gives x · Wᵀ + scale · (x · a_RKᵀ) · b_NRᵀ."""

    a_RK: Tensor  # noqa: N815
    b_NR: Tensor  # noqa: N815
    scale: float


class AdapterFolder:
    """An adapter that fits a decoder; its tensors stay on disk until `load`."""

    def __init__(self, name: str, folder: Path, base: Checkpoint) -> None:
        """Read the settings and the shapes.

        Raises:
            InputError: missing, damaged, pickled, or of another network.
            ConfigError: of another kind than LoRA on the linear layers of attention and MLP, or of other weights.
        """
        self.name, self._path = name, folder / TENSORS
        self._said = f"adapter {name} ({folder})"
        if not folder.is_dir():
            raise InputError(f"{self._said}: there is no such folder")
        if not self._path.is_file() and (folder / PICKLED).is_file():
            raise InputError(
                f"{self._said} is pickled, which is not read, since a pickle can run code; save it with PEFT's "
                "safe_serialization=True"
            )
        if not (folder / SETTINGS).is_file():
            inside = folder / "adapter"  # of a merged checkpoint that `penjing train` wrote
            where = f"give {inside}" if (inside / SETTINGS).is_file() else f"give a folder with it and {TENSORS}"
            raise InputError(f"{self._said} has no {SETTINGS}, so it is no adapter in PEFT's format; {where}")
        settings = read_json_object(folder / SETTINGS)
        if others := not_plain(settings, besides=("use_rslora",)):
            raise ConfigError(f"{self._said} is no plain LoRA adapter, which is all that is served: it has {others}")
        self.scale = self._scale(settings)
        self._shapes = {name: shape for name, shape in tensor_shapes(base.config).items() if _LAYER.match(name)}
        self.ranks = self._look()
        self._transforms: LayerTransforms | None = None
        if BASE in settings and settings[BASE] == base_hash(base.folder):
            return
        self._check_moved(settings, base)
        self._transforms = read_transforms(base.folder, base.config)
        originals = [] if base.manifest is None else base.manifest.listed(ORIGINALS)
        if BASE in settings and settings[BASE] not in originals and (originals or base.quantization is None):
            raise ConfigError(
                f"{self._said} was trained beside {settings.get('base_model_name_or_path')}, and {base.folder} has "
                "other weights; serve that checkpoint, or an artifact made of it"
            )
        if base.quantization is not None and self._transforms is None:
            self._check_transforms(base.folder)

    def load(self, dtype: torch.dtype | None = None) -> dict[str, LoraPair]:
        """Linear layer's name in the model → its pair, in `dtype`, else as it is stored.

        Beside an artifact whose layers were changed before they were rounded, the pair is changed alike.

        Raises:
            InputError: it cannot be read, or has a number that is not finite.
        """
        pairs: dict[str, LoraPair] = {}
        try:
            with safe_open(self._path, framework="pt") as reader:
                for layer in self.ranks:
                    a_RK, b_NR = (reader.get_tensor(f"{PREFIX}{layer}.lora_{part}.weight") for part in "AB")
                    for tensor in (a_RK, b_NR):
                        if not bool(tensor.isfinite().all()):
                            raise InputError(f"{self._said}: {layer} holds NaN or infinity; get the adapter again")
                    kind = dtype or torch.promote_types(a_RK.dtype, b_NR.dtype)
                    if self._transforms is not None:
                        a_RK = self._transforms.reading(layer, a_RK)
                        b_NR = self._transforms.giving(layer, b_NR)
                    pairs[layer] = LoraPair(a_RK.to(kind), b_NR.to(kind), self.scale)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self._said}: {TENSORS} cannot be read ({error}); get the adapter again") from error
        return pairs

    def _check_moved(self, settings: dict[str, Any], base: Checkpoint) -> None:
        moved = [] if base.manifest is None or BASE in settings else base.manifest.listed(MOVED)
        found = sorted({name for name in moved for layer in self.ranks if layer.endswith(f".{name}")})
        if found:
            raise ConfigError(
                f"{self._said} was not trained beside what penjing imported, where {', '.join(found)} have another "
                "order or other factors than in the published folder. Merge it into that folder (PEFT's "
                "merge_and_unload) and import that, or train it with penjing"
            )

    def _check_transforms(self, folder: Path) -> None:
        try:
            steps = tomllib.loads((folder / RECIPE_FILE).read_text(encoding="utf-8")).get("steps", [])
        except FileNotFoundError:  # made by another program
            return
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / RECIPE_FILE} cannot be read ({error}); make the artifact again") from error
        moved = {name for step in steps for name in _MOVES if step.get("transform", {}).get(name)}
        if moved:
            raise ConfigError(
                f"{self._said} is beside the weights that {folder} was made of, and those were changed before they "
                f"were rounded, by {', '.join(sorted(moved))} of its recipe's transform. How is not kept: an older "
                f"penjing made it. Make it again with 'penjing compress {folder / RECIPE_FILE} --out {folder} --force'"
            )

    def _scale(self, settings: Mapping[str, Any]) -> float:
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
            raise InputError(f"{self._said}: r = {json.dumps(rank):.40}; it is a whole number from 1 to {MAX_RANK}")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise InputError(f"{self._said}: lora_alpha = {json.dumps(alpha):.40}; it is a number")
        self._rank = rank
        return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank

    def _look(self) -> dict[str, int]:
        """Layer → rank, of those that have an adapter, by the file's header alone."""
        shapes: dict[str, dict[str, list[int]]] = {}
        try:
            with safe_open(self._path, framework="pt") as reader:
                for stored in list(reader.keys()):
                    found = _PART.fullmatch(stored.removeprefix(PREFIX))
                    if found is None or not stored.startswith(PREFIX) or f"{found['layer']}.weight" not in self._shapes:
                        raise InputError(
                            f"{self._said} has {stored:.100}, which is beside no linear layer of attention or MLP of "
                            "this model; give an adapter of this model and of such layers"
                        )
                    tensor = reader.get_slice(stored)
                    if tensor.get_dtype() not in _TYPES:
                        raise InputError(
                            f"{self._said}: {stored:.100} is {tensor.get_dtype()}, not {', '.join(_TYPES)}"
                        )
                    shapes.setdefault(found["layer"], {})[found["part"]] = list(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self._said}: {TENSORS} cannot be read ({error}); get the adapter again") from error
        if not shapes:
            raise InputError(f"{self._said} is empty; get the adapter again")
        for layer, parts in shapes.items():
            outputs, inputs = self._shapes[f"{layer}.weight"]
            for part, wanted in (("A", [self._rank, inputs]), ("B", [outputs, self._rank])):
                if parts.get(part) != wanted:
                    given = f"shape {parts[part]}" if part in parts else "nothing"
                    raise InputError(
                        f"{self._said}: {layer}.lora_{part} has {given}, beside this model and with r = {self._rank} "
                        f"it has {wanted}; give an adapter of this model"
                    )
        return dict.fromkeys(shapes, self._rank)
