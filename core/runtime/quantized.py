"""INT8 linear layers in a decoder, and the compressed-tensors description that says which layers they are.

An artifact stores `X.weight` (int8, (out, in)) and `X.weight_scale` (floating, (out, 1)) for each quantized linear
layer X; activations are quantized per token while it runs (W8A8, `kernels.int8_linear`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from penjing.core.errors import InputError
from penjing.kernels.int8_linear import PackedInt8, int8_linear, prepack_int8

# The fields of a compressed-tensors scheme that W8A8 fixes; anything else is another computation.
WEIGHT_FIELDS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATION_FIELDS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}

# Of an INT8 KV cache with one calibrated scale a layer, X.self_attn.k_scale and v_scale. This engine reads them and
# keeps its own scale for each token and head, which is finer; other engines may need them.
KV_CACHE_FIELDS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


class Int8Linear(nn.Module):
    """A linear layer with INT8 weights; (…, in_features) floating → (…, out_features) float32.

    It has no parameters: `packed` is made for the device that the weight lies on.
    """

    def __init__(self, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None = None):
        super().__init__()
        self.packed: PackedInt8 = prepack_int8(weight_NK, scale_N, bias_N)
        self.in_features, self.out_features = self.packed.in_features, self.packed.out_features

    def forward(self, x: Tensor) -> Tensor:
        y_MN = int8_linear(x.reshape(-1, self.in_features), self.packed)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def apply_int8(model: nn.Module, names: Iterable[str], tensor: Callable[[str], Tensor]) -> None:
    """Replace the linear layers `names` of `model` by INT8 ones, one at a time.

    Args:
        model: changed in place; may lie on the meta device.
        names: module names, such as "model.layers.0.mlp.up_proj".
        tensor: tensor name → tensor; called for X.weight, X.weight_scale and, where the layer has one, X.bias.

    Raises:
        InputError: a tensor has another shape or dtype than its layer needs.
    """
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise InputError(f"{name} is a {type(layer).__name__}; only linear layers are quantized to INT8")
        weight_NK, scale_N = tensor(f"{name}.weight"), tensor(f"{name}.weight_scale")
        if weight_NK.shape != (layer.out_features, layer.in_features):
            raise InputError(
                f"{name}.weight has shape {tuple(weight_NK.shape)}; "
                f"config.json asks for ({layer.out_features}, {layer.in_features})"
            )
        try:
            quantized = Int8Linear(weight_NK, scale_N, tensor(f"{name}.bias") if layer.bias is not None else None)
        except ValueError as error:
            raise InputError(f"{name}: {error}") from None
        model.set_submodule(name, quantized)


def int8_modules(quantization_config: dict[str, Any], linear_names: Iterable[str]) -> list[str]:
    """Which of `linear_names` a compressed-tensors `quantization_config` quantizes to W8A8.

    Raises:
        InputError: another method, format or scheme; it names the field and the value that penjing runs.
    """
    method, layout = quantization_config.get("quant_method"), quantization_config.get("format", "int-quantized")
    if method != "compressed-tensors" or layout != "int-quantized":
        raise InputError(
            f"quant_method {method!r} with format {layout!r}: penjing runs compressed-tensors int-quantized"
        )
    if quantization_config.get("kv_cache_scheme") is not None:
        _require("kv_cache_scheme", quantization_config["kv_cache_scheme"], KV_CACHE_FIELDS)
    groups = quantization_config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise InputError(f"config_groups is {groups!r}: an object of schemes and their targets is needed")
    targets: list[str] = []
    for group_name, group in groups.items():
        if not isinstance(group, dict):
            raise InputError(f"config_groups.{group_name} is {group!r}: an object is needed")
        _require(f"{group_name}.weights", group.get("weights"), WEIGHT_FIELDS)
        _require(f"{group_name}.input_activations", group.get("input_activations"), ACTIVATION_FIELDS)
        if group.get("output_activations") is not None:
            raise InputError(f"{group_name}.output_activations is set: penjing leaves outputs in float32")
        targets += _names(f"{group_name}.targets", group.get("targets"))
    ignore = _names("ignore", quantization_config.get("ignore") or [])
    return [
        name
        for name in linear_names
        if any(_matches(target, name) for target in targets) and not any(_matches(entry, name) for entry in ignore)
    ]


def _names(where: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where} is {value!r}: a list of module names, classes or re:patterns is needed")
    return value


def _require(where: str, scheme: Any, fields: dict[str, Any]) -> None:
    if not isinstance(scheme, dict):
        raise InputError(f"{where} is missing: penjing runs W8A8, weights and activations in INT8")
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
