"""Which linear layers of a checkpoint are quantized and how: its compressed-tensors `quantization_config`, read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from penjing.core.errors import InputError
from penjing.kernels.cpu.packing import LARGEST_STEPPED_GROUP, LEAST_GROUP
from penjing.kernels.int4_linear import FLOATING, ActivationBits
from penjing.kernels.quantize import ABOVE_INPUTS

INT8_FORMAT, INT4_FORMAT, MIXED_FORMAT = "int-quantized", "pack-quantized", "mixed-precision"
# Not one of compressed-tensors: its zero points are integers, while a group's offset here is any number, as in Q4_1.
OFFSET_FORMAT = "penjing-q4_1"
# Nor this: INT8 weights in 4 bits, `kernels.stepped`.
STEPPED_FORMAT = "penjing-stepped"
# The fields of a compressed-tensors scheme that W8A8, W4A8 and W4A16 fix; anything else is another computation. Without
# input_activations 4-bit weights are W4A16, computed with bfloat16.
WEIGHT_FIELDS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT4_WEIGHT_FIELDS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False}
ACTIVATION_FIELDS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
OFFSET_WEIGHT_FIELDS = INT4_WEIGHT_FIELDS | {"symmetric": False}
OFFSET_ACTIVATION_FIELDS = ACTIVATION_FIELDS | {"strategy": "group"}
STEPPED_WEIGHT_FIELDS = OFFSET_WEIGHT_FIELDS | {"scale_dtype": "int8"}

# Of weights in 8 bits or in steps. The scheme has a scale and a zero point a token; this engine keeps its own for each
# block of inputs (`kernels.quantize.ABOVE_INPUTS`), which is finer, as it does for a KV cache.
ABOVE_FIELDS = ACTIVATION_FIELDS | {"symmetric": False}

# What a stored form asks of weights and activations.
_FORMATS = {
    INT8_FORMAT: (WEIGHT_FIELDS, ACTIVATION_FIELDS),
    INT4_FORMAT: (INT4_WEIGHT_FIELDS, ACTIVATION_FIELDS),
    OFFSET_FORMAT: (OFFSET_WEIGHT_FIELDS, OFFSET_ACTIVATION_FIELDS),
    STEPPED_FORMAT: (STEPPED_WEIGHT_FIELDS, ACTIVATION_FIELDS),
}

EMBEDDING_MODULE = "model.embed_tokens"

# Of an INT8 KV cache with one calibrated scale a layer, X.self_attn.k_scale and v_scale. This engine reads them and
# keeps its own scale for each token and head, which is finer; other engines may need them.
KV_CACHE_FIELDS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}

T = TypeVar("T")


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is stored: 8 bits with a scale a channel, or 4 bits with one for each `group` inputs.

    With offsets a group also has what its weights lie above, and activations have a scale for each group. With steps
    the scale is a channel's, and a group has a whole step and offset. With zero points, of weights in 8 bits or in
    steps, activations have a scale and a zero point for each block of inputs. Beside 4-bit weights activations may have
    16 bits: bfloat16.
    """

    bits: Literal[4, 8]
    group: int = 0
    offsets: bool = False
    zero_points: bool = False
    steps: bool = False
    activation_bits: ActivationBits = 8

    @property
    def activation_group(self) -> int | None:
        """Inputs that share a scale of activations; 0: all of a token; None: they are bfloat16."""
        if self.activation_bits == FLOATING:
            return None
        return self.group if self.offsets else 0

    def tensor_names(self, module: str) -> tuple[str, ...]:
        """The tensors that stand for `module`.weight."""
        weights = ("weight",) if self.bits == 8 else ("weight_packed", "weight_shape")
        offsets = ("weight_step", "weight_offset") if self.steps else ("weight_offset",) if self.offsets else ()
        return tuple(f"{module}.{name}" for name in (*weights, "weight_scale", *offsets))


INT8, INT8_ABOVE = Scheme(8), Scheme(8, zero_points=True)


def quantized_modules(quantization_config: dict[str, Any], linear_names: Iterable[str]) -> dict[str, Scheme]:
    """Which of `linear_names` a compressed-tensors `quantization_config` quantizes to W8A8, W4A8 or W4A16.

    Raises:
        InputError: another method, format or scheme; it names the field and the value that penjing runs.
    """
    method, layout = quantization_config.get("quant_method"), quantization_config.get("format", INT8_FORMAT)
    if method != "compressed-tensors" or layout not in (*_FORMATS, MIXED_FORMAT):
        raise InputError(
            f"quant_method {method!r} with format {layout!r}: penjing runs compressed-tensors {INT8_FORMAT} (W8A8), "
            f"{INT4_FORMAT} (W4A8, W4A16), its own {OFFSET_FORMAT} and {STEPPED_FORMAT}, and {MIXED_FORMAT} of these"
        )
    if quantization_config.get("kv_cache_scheme") is not None:
        _require("kv_cache_scheme", quantization_config["kv_cache_scheme"], KV_CACHE_FIELDS)

    def read(group_name: str, group: dict[str, Any]) -> Scheme | None:
        if group.get("targets") == [EMBEDDING_MODULE]:
            _require(f"{group_name}.weights", group.get("weights"), WEIGHT_FIELDS)
            return None
        return _scheme(group_name, group, layout)

    return by_module(quantization_config, linear_names, read)


def by_module(
    quantization_config: dict[str, Any], names: Iterable[str], read: Callable[[str, dict[str, Any]], T | None]
) -> dict[str, T]:
    """What `read` makes of the group of `config_groups` that is for each of `names`; a module that none is for, or that
    is ignored, is left out.

    A group that names a layer is taken before one that names its class.

    Args:
        read: name of a group and its values → what it asks for; None: the group is left out.

    Raises:
        InputError: groups, targets or names to ignore are not what they must be.
    """
    groups = quantization_config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise InputError(f"config_groups is {groups!r}: an object of schemes and their targets is needed")
    by_target: list[tuple[str, T]] = []
    for group_name, group in groups.items():
        if not isinstance(group, dict):
            raise InputError(f"config_groups.{group_name} is {group!r}: an object is needed")
        scheme = read(group_name, group)
        if scheme is not None:
            by_target += [(target, scheme) for target in _names(f"{group_name}.targets", group.get("targets"))]
    ignore = _names("ignore", quantization_config.get("ignore") or [])
    by_target.sort(key=lambda entry: entry[0] == "Linear")  # stable: among names the first one counts
    found = {}
    for name in names:
        schemes = [scheme for target, scheme in by_target if _matches(target, name)]
        if schemes and not any(_matches(entry, name) for entry in ignore):
            found[name] = schemes[0]
    return found


def has_int8_embedding(quantization_config: dict[str, Any] | None) -> bool:
    """Whether a `quantization_config` that `quantized_modules` has read puts the embedding into INT8."""
    groups = () if quantization_config is None else quantization_config["config_groups"].values()
    return any(group.get("targets") == [EMBEDDING_MODULE] for group in groups)


def has_steps(quantization_config: dict[str, Any] | None) -> bool:
    """Whether a `quantization_config` that `quantized_modules` has read stores INT8 weights in 4 bits."""
    groups = () if quantization_config is None else quantization_config["config_groups"].values()
    layout = None if quantization_config is None else quantization_config.get("format")
    return any((group.get("format") or layout) == STEPPED_FORMAT for group in groups)


def offset_group(quantization_config: dict[str, Any] | None) -> int:
    """Inputs of a group of the 4-bit weights that have offsets; 0 where none has."""
    groups = () if quantization_config is None else quantization_config["config_groups"].values()
    layout = None if quantization_config is None else quantization_config.get("format")
    sizes = [group["weights"]["group_size"] for group in groups if (group.get("format") or layout) == OFFSET_FORMAT]
    return sizes[0] if sizes else 0


def _scheme(name: str, group: dict[str, Any], layout: str) -> Scheme:
    stored = group.get("format") or layout
    if stored not in _FORMATS:
        raise InputError(f"{name}.format is {stored!r}: penjing runs {', '.join(_FORMATS)}")
    weights, activations = group.get("weights"), group.get("input_activations")
    _require(f"{name}.weights", weights, _FORMATS[stored][0])
    above = (
        stored in (INT8_FORMAT, STEPPED_FORMAT)
        and isinstance(activations, dict)
        and activations.get("symmetric") is False
    )
    floating = stored in (INT4_FORMAT, OFFSET_FORMAT) and activations is None
    if not floating:
        _require(f"{name}.input_activations", activations, ABOVE_FIELDS if above else _FORMATS[stored][1])
    if group.get("output_activations") is not None:
        raise InputError(f"{name}.output_activations is set: penjing leaves outputs in float32")
    if stored == INT8_FORMAT:
        return INT8_ABOVE if above else INT8
    size = weights.get("group_size") if isinstance(weights, dict) else None
    if not isinstance(size, int) or size < LEAST_GROUP or size % LEAST_GROUP:
        raise InputError(f"{name}.weights.group_size is {size!r}: penjing runs multiples of {LEAST_GROUP}")
    if stored == STEPPED_FORMAT and size > LARGEST_STEPPED_GROUP:
        raise InputError(f"{name}.weights.group_size is {size}: penjing runs at most {LARGEST_STEPPED_GROUP} in steps")
    if above and ABOVE_INPUTS % size:
        raise InputError(
            f"{name}.weights.group_size is {size}: with zero points penjing runs what divides {ABOVE_INPUTS}"
        )
    if isinstance(weights, dict) and weights.get("actorder") not in (None, "static", "weight"):
        raise InputError(f"{name}.weights.actorder is {weights['actorder']!r}: penjing runs groups that lie together")
    if stored == OFFSET_FORMAT and not floating:
        _require(f"{name}.input_activations", activations, {"group_size": size})
    if stored == STEPPED_FORMAT:
        return Scheme(4, size, steps=True, zero_points=above)
    return Scheme(4, size, offsets=stored == OFFSET_FORMAT, activation_bits=FLOATING if floating else 8)


def _names(where: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where} is {value!r}: a list of module names, classes or re:patterns is needed")
    return value


def _require(where: str, scheme: Any, fields: dict[str, Any]) -> None:
    if not isinstance(scheme, dict):
        raise InputError(f"{where} is missing: penjing runs W8A8, W4A8 and W4A16")
    for key, wanted in fields.items():
        value = scheme.get(key, False if key == "dynamic" else None)
        if value != wanted:
            raise InputError(f"{where}.{key} is {value!r}: penjing runs {wanted!r}")


def _matches(target: str, name: str) -> bool:
    """compressed-tensors' rule: a class name, a module name, or a regular expression after `re:`."""
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), name) is not None
        except re.error as error:
            raise InputError(f"quantization_config: {target} is no regular expression: {error}") from None
    return target in ("Linear", name)
