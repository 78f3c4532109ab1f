"""One decoder layer: rotate, calibrate, smooth, quantize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.compensate import error_spread, quantize_compensated
from penjing.compress.decoder.int4 import (
    GroupedWeight,
    group_range,
    group_scale,
    quantize_grouped,
    quantize_grouped_compensated,
    whole_range,
)
from penjing.compress.decoder.parts import inner_norm, is_routed, mlps, same_input
from penjing.compress.decoder.rotate import rotate_layer, rotation_matrix
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.smooth import FindScale, Heads, by_alpha, smooth_linears
from penjing.compress.decoder.smooth_search import Search
from penjing.compress.decoder.stream import Beside, LayerStream, Weights
from penjing.compress.decoder.weights import (
    LinearError,
    QuantizedWeight,
    fake_quantize_activation,
    linear_error,
    quantize_per_channel,
)
from penjing.compress.rounding.stepped import SteppedWeight, quantize_stepped, quantize_stepped_compensated
from penjing.core.artifact.transform import INPUTS, NORMS
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.mlp import GATED
from penjing.kernels.hadamard import hadamard
from penjing.kernels.rounding import INT8_LIMIT

SAMPLE_ROWS = 4096  # calibration tokens whose activations are kept while their layer is done
ERROR_ROWS = 512  # of them, for output errors
FEW_ROWS = 128  # of them: an expert that saw fewer is calibrated as if it had seen all
# The first of those that share an input.
_OBSERVED = (".q_proj", ".o_proj", ".in_proj", ".out_proj", ".gate_proj", ".down_proj", "mlp.gate")


class Activations:
    """Rows of what calibration saw at the input of each group of linear layers: the first position of each window, the
    attention sink with its massive activations, and positions evenly spread over the rest."""

    def __init__(self, num_windows: int) -> None:
        self._rows_per_window = max(1, SAMPLE_ROWS // num_windows)
        self._rows: dict[str, list[Tensor]] = {}

    def observe(self, name: str, x: Tensor) -> None:
        """Take in one window's activations (1, T, K), behind a router (T, K), at linear layer `name`."""
        if name.endswith(_OBSERVED):
            self._rows.setdefault(name, []).append(self.rows_of(x if x.dim() == 3 else x[None]).clone())

    def samples(self) -> dict[str, Tensor]:
        """Group → (M, K) float32."""
        return {name: torch.cat(rows) for name, rows in self._rows.items()}

    def rows_of(self, hidden_WTE: Tensor) -> Tensor:
        """(M, E) the hidden states of the tokens that are kept."""
        step = max(1, hidden_WTE.shape[1] // self._rows_per_window)
        return hidden_WTE[:, ::step].flatten(0, 1)


class LargestKV:
    """The largest keys and values of a layer, for one static scale each (compressed-tensors' kv_cache_scheme)."""

    def __init__(self) -> None:
        self._key, self._value_CD = torch.zeros(()), torch.zeros(())

    def observe(self, k: Tensor, v: Tensor) -> None:
        """Take in one window's keys and values (1, T, KV, D)."""
        self._key = torch.maximum(self._key, k.abs().amax())
        self._value_CD = torch.maximum(self._value_CD, v.abs().flatten(0, -3).amax(dim=0))

    def scales(self, divided_K: Tensor | None) -> Weights:
        """`self_attn.k_scale` and `v_scale`, (1,) float32; 1 where all is zero.

        Args:
            divided_K: (H·D,) what smoothing divides the input of o_proj by: the values, that is.
        """
        value_CD = self._value_CD
        if divided_K is not None:  # the query heads of a value head share its scales
            num_heads, head_dim = value_CD.shape
            value_CD = value_CD / divided_K.view(num_heads, -1, head_dim)[:, 0]
        found = {}
        for name, largest in (("k_scale", self._key), ("v_scale", value_CD.amax())):
            scale = largest.to(torch.float32).view(1) / INT8_LIMIT
            found[f"self_attn.{name}"] = scale.masked_fill(scale == 0, 1.0)
        return found


@dataclass(frozen=True)
class Rotations:
    """The orthogonal matrices of a run, float64; None: the settings does not rotate."""

    residual_EE: Tensor  # noqa: N815
    head_DD: Tensor  # noqa: N815

    @classmethod
    def of(cls, settings: Int8Settings, hidden_size: int, head_dim: int) -> Rotations | None:
        if not settings.transform.rotate:
            return None
        seed = settings.transform.rotate_seed
        return cls(rotation_matrix(hidden_size, seed), rotation_matrix(head_dim, seed + 1))


@dataclass(frozen=True)
class CompressedLayer:
    """Tensors of the artifact by their names inside the layer, the error of each quantized linear layer, the experts
    that saw few calibration tokens, with how many, and how the layer was changed (`core.artifact.transform`)."""

    tensors: Weights
    errors: dict[str, LinearError]
    few: dict[int, int]
    changes: Weights


@torch.no_grad()
def compress_layer(
    stream: LayerStream,
    layer: int,
    settings: Int8Settings,
    rotations: Rotations | None,
    hidden_WTE: Tensor,
    beside: Beside | None = None,
) -> CompressedLayer:
    """Compress `layer`; `hidden_WTE`, the calibration text's (rotated) hidden states, moves on to the next layer.
    `beside`: what else layers read of that text."""
    weights = stream.weights(layer)
    changes: Weights = {}
    if rotations is not None:
        changes = {f"{norm}.folded": weights[f"{norm}.weight"].clone() for norm in NORMS}
        rotate_layer(weights, stream.config, rotations.residual_EE, rotations.head_DD)
    seen = Activations(num_windows=hidden_WTE.shape[0])
    largest = LargestKV()
    stream.run(stream.float_layer(layer, weights), hidden_WTE, seen.observe, largest.observe, beside=beside)
    samples = seen.samples()
    few = fill_up(samples, weights, stream.config)
    _check_finite(samples, layer)
    hidden_ME = seen.rows_of(hidden_WTE)

    def rule_of(linear: str) -> FindScale:
        if is_routed(linear):
            return _routed_rule(settings)
        return _rule(settings, hidden_ME, settings.above(f"model.layers.{layer}.{linear}"))

    transform = settings.transform
    if stream.config.keys_of(layer) != layer or stream.config.lends_keys(layer):
        transform = transform.model_copy(update={"smooth_output": 0.0})  # values are of several layers
    scales = smooth_linears(weights, samples, stream.config, transform, rule_of)
    changes |= {f"{first}.divided": scales[first] for first in INPUTS if first in scales}
    inputs = {name: x_MK / scales[name] if name in scales else x_MK for name, x_MK in samples.items()}
    if block := settings.transform.hadamard_down:
        inputs["mlp.down_proj"] = hadamard(inputs["mlp.down_proj"], block)
        weights["mlp.down_proj.weight"] = hadamard(weights["mlp.down_proj.weight"], block)

    tensors, errors = dict(weights), {}
    for name in weights:
        linear = name.removesuffix(".weight")
        if linear.endswith("_proj") and settings.keeps(f"model.layers.{layer}.{linear}"):
            tensors[name] = weights[name].to(DTYPES[settings.keep_dtype])
    for group, linears in same_input(weights).items():
        quantized_here = [name for name in linears if not settings.keeps(f"model.layers.{layer}.{name}")]
        if not quantized_here:
            continue
        x_MK = inputs[group]
        formats = {settings.bits(f"model.layers.{layer}.{linear}") for linear in quantized_here}
        above = settings.above(f"model.layers.{layer}.{group}")
        rules_of = {bits: (int8_rule if bits == 8 else int4_rule)(settings, x_MK, above) for bits in formats}
        for linear in quantized_here:
            bits = settings.bits(f"model.layers.{layer}.{linear}")
            quantized = rules_of[bits](weights[f"{linear}.weight"])
            few_MK = x_MK[:: max(1, len(x_MK) // ERROR_ROWS)]
            errors[linear] = linear_error(
                weights[f"{linear}.weight"], quantized, few_MK, settings.activation_group(bits), above
            )
            del tensors[f"{linear}.weight"]
            tensors |= quantized_tensors(linear, quantized)
    if settings.kv_cache == "int8" and layer in stream.config.attention_layers:
        values_divided = inner_norm(weights, "self_attn.o_proj") is None  # else the norm is
        tensors |= largest.scales(scales.get("self_attn.o_proj") if values_divided else None)
    return CompressedLayer(tensors, errors, few, changes)


def int8_rule(settings: Int8Settings, x_MK: Tensor, above: bool = False) -> Callable[[Tensor], QuantizedWeight]:
    """How the settings round the 8-bit weights that read the activations `x_MK`; `above`: with zero points."""
    if settings.rounding == "nearest":
        return quantize_per_channel
    spread_KK = error_spread(fake_quantize_activation(x_MK, above=above))
    return lambda weight_NK: quantize_compensated(weight_NK, spread_KK)


def int4_rule(
    settings: Int8Settings, x_MK: Tensor, above: bool = False
) -> Callable[[Tensor], GroupedWeight | SteppedWeight]:
    """How the settings round the 4-bit weights that read the activations `x_MK`; `above`: with zero points."""
    fit = (whole_range if settings.offsets == "whole" else group_range) if settings.offsets else group_scale
    if settings.rounding == "nearest":
        importance_K = x_MK.square().mean(dim=0)
        if settings.scales == "whole":
            return lambda weight_NK: quantize_stepped(weight_NK, settings.group, importance_K)
        return lambda weight_NK: quantize_grouped(weight_NK, settings.group, importance_K, fit)
    spread_KK = error_spread(fake_quantize_activation(x_MK, settings.activation_group(4), above))
    if settings.scales == "whole":
        return lambda weight_NK: quantize_stepped_compensated(weight_NK, settings.group, spread_KK)
    return lambda weight_NK: quantize_grouped_compensated(weight_NK, settings.group, spread_KK, fit)


def _rule(settings: Int8Settings, hidden_ME: Tensor, above: bool) -> FindScale:
    """How smoothing scales are found; an error counts by the size of the residual stream that it is added to."""
    if settings.transform.search_steps == 0:
        return by_alpha
    token_M = 1 / hidden_ME.square().mean(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return Search(token_M / token_M.mean(), settings.transform.search_steps, _group(settings), above, _rounds(settings))


def _routed_rule(settings: Int8Settings) -> FindScale:
    """The same behind a router, where the tokens differ from expert to expert: they all count alike."""
    steps = settings.transform.search_steps
    if steps == 0:
        return by_alpha

    def find(x_MK: Tensor, weight_NK: Tensor, alpha: float, heads: Heads | None) -> Tensor:
        search = Search(torch.ones(len(x_MK)), steps, _group(settings), rounds=_rounds(settings))
        return search(x_MK, weight_NK, alpha, heads)

    return find


def _group(settings: Int8Settings) -> int:
    return settings.group if settings.weights_bits == 4 else 0


def _rounds(settings: Int8Settings) -> bool:
    return settings.activations_bits == 8


def fill_up(samples: dict[str, Tensor], weights: Weights, config: DecoderConfig) -> dict[int, int]:
    """Give each expert that saw few tokens the sample of all tokens, in place.

    Returns:
        Expert → how many it saw.
    """
    few: dict[int, int] = {}
    activate = GATED["silu" if config.moe is None else config.moe.activation]
    for mlp in filter(is_routed, mlps(weights)):
        gate, up, down = (f"{mlp}.{part}" for part in ("gate_proj", "up_proj", "down_proj"))
        rows = len(samples.get(gate, ()))
        if rows < FEW_ROWS:
            few[int(mlp.rpartition(".")[2])] = rows
            x_MK = samples[gate] = samples["mlp.gate"]
            samples[down] = activate(
                *(F.linear(x_MK, weights[f"{part}.weight"], weights.get(f"{part}.bias")) for part in (gate, up))
            )
    return few


def _check_finite(samples: dict[str, Tensor], layer: int) -> None:
    for group, x_MK in samples.items():
        if bad := int((~torch.isfinite(x_MK)).any(dim=1).sum()):
            raise InputError(
                f"model.layers.{layer}.{group}: its input is NaN or infinite for {bad} of {len(x_MK)} calibration "
                "tokens; the weights are finite, so the model overflows: it is damaged, or its training diverged"
            )


def quantized_tensors(module: str, quantized: QuantizedWeight | GroupedWeight | SteppedWeight) -> Weights:
    """The tensors of a quantized linear layer, under compressed-tensors' names where it has them."""
    if isinstance(quantized, SteppedWeight):
        return {
            f"{module}.weight_packed": quantized.stored.packed_NK8,
            f"{module}.weight_shape": torch.tensor(quantized.number_NK.shape),
            f"{module}.weight_scale": quantized.scale_N1,
            f"{module}.weight_step": quantized.step_NG,
            f"{module}.weight_offset": quantized.offset_NG,
        }
    if isinstance(quantized, GroupedWeight):
        found = {
            f"{module}.weight_packed": quantized.packed(),
            f"{module}.weight_shape": torch.tensor(quantized.weight_NK.shape),
            f"{module}.weight_scale": quantized.scale_NG,
        }
        if quantized.offset_NG is not None:
            found[f"{module}.weight_offset"] = quantized.offset_NG
        return found
    return {f"{module}.weight": quantized.weight_NK, f"{module}.weight_scale": quantized.scale_N1}
