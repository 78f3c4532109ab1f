"""Linear layers of a decoder while it learns: they compute in floating point what the runtime computes in integers.

Weights are rounded to 8 bits with a scale a row, or to 4 bits with a grid for each group of inputs, and activations as
the runtime rounds them; gradients pass as if nothing was rounded. A weight is learnt in steps of the grid that it began
with, and the grid beside it. Scales are learnt in the logarithm (https://arxiv.org/abs/1903.08066): they stay positive,
and a step of an optimiser changes large and small ones alike.

The scale of a row of 8 bits is learnt by LSQ's gradient (https://arxiv.org/abs/1902.08153): where it changes, its
weights stay and are rounded anew. The grid of a group of 4 bits moves its weights, whose integers stay: in a short
training few integers change, and scales and offsets are what can make up for the others. Where these are whole numbers
on top of the scale of a row, that scale and the offsets are learnt, and the steps stay, which a training as short would
not change by one. Of 64 updates 3 in 10 000 offsets change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.decoder.int4 import LEAST_SCALE, GroupedWeight
from penjing.compress.decoder.weights import QuantizedWeight
from penjing.compress.rounding.formats import INT4_WEIGHT, INT8_WEIGHT, NumberFormat
from penjing.compress.rounding.stepped import SteppedWeight
from penjing.core.runtime.schemes import INT8, Scheme
from penjing.kernels.int4_linear import OFFSET, unpack_int4
from penjing.kernels.quantize import dequantize_above, quantize_above, quantize_per_token_torch
from penjing.kernels.rounding import INT8_LIMIT
from penjing.kernels.stepped import LARGEST_NUMBER

UNITS = {8: 0.005, 4: 0.01}  # by bits: an update of 1e-5 moves a weight by 0.002 or 0.001 of its scale
SCALE_RATE = 10.0  # an update of 1e-5 changes a scale by 1e-4 of itself: the largest weight of 8 bits by 0.013 of it
ROW_RATE = 30.0  # … the scale of a row with whole steps, of which there are fewer
OFFSET_RATE = 80.0  # … and an offset by 8e-4 of its scale: as much as the scale changes what is 8 steps away
INSIDE = 0.49  # of a scale: how far a weight may begin from the integer that it begins with
EDGE = 1e-3  # of a scale: a weight beyond the last integer would count as clipped, and not learn

Stored = QuantizedWeight | GroupedWeight | SteppedWeight


class _Activation(torch.autograd.Function):
    """Activations (…, K) as the runtime rounds them; no value is ever clipped, so the gradient is the identity's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scheme: Scheme) -> Tensor:
        group = scheme.activation_group
        if group is None:
            return x.to(torch.bfloat16).to(x.dtype)
        if scheme.zero_points:
            rounded_MK = dequantize_above(*quantize_above(x.reshape(-1, x.shape[-1])))
            return rounded_MK.view(x.shape).to(x.dtype)
        q_MK, scale_M = quantize_per_token_torch(x.reshape(-1, group or x.shape[-1]))
        return (q_MK.to(torch.float32) * scale_M[:, None]).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class _Weight(torch.autograd.Function):
    """Steps (N, G, B) → integers × scale_NG1 + middle_NG1; a weight that is clipped learns nothing."""

    @staticmethod
    def forward(ctx: Any, steps: Tensor, scale: Tensor, middle: Tensor | None, values: NumberFormat) -> Tensor:
        inside = (steps >= values.low) & (steps <= values.high)
        integers = values.store(steps)
        ctx.save_for_backward(inside, integers.to(torch.int8), scale)
        ctx.has_middle = middle is not None
        weight = integers.mul_(scale)
        return weight if middle is None else weight.add_(middle)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inside, integers, scale = ctx.saved_tensors
        to_scale = (gradient * integers).sum(dim=-1, keepdim=True)
        to_middle = gradient.sum(dim=-1, keepdim=True) if ctx.has_middle else None
        return (gradient * scale).mul_(inside), to_scale, to_middle, None


class RoundedLinear(nn.Linear):
    """`Int8Linear` or `Int4Linear` for training; (…, in_features) → (…, out_features).

    Attributes:
        scheme: how it is rounded.
        weight: (out_features, in_features) how many of the steps that it began with each weight is from the middle of
            its grid, times `unit`.
        growth: (out_features, groups) logarithms of the scales over those that training began with, over `rate`; with
            whole steps (out_features, 1).
        rate: SCALE_RATE, or ROW_RATE with whole steps.
        shift: (out_features, groups), where there are offsets, how far they are from those that training began with,
            over the scales that it began with, or the steps, and OFFSET_RATE.
        begun_scale, begun_offset: as `growth` and `shift`, the scales and offsets that training began with.
        step: (out_features, groups), where the scheme has them.
    """

    begun_scale: Tensor
    begun_offset: Tensor
    step: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | None = None,
        scheme: Scheme = INT8,
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.scheme, self.values = scheme, INT8_WEIGHT if scheme.bits == 8 else INT4_WEIGHT
        self.unit = UNITS[scheme.bits]
        self.groups = in_features // scheme.group if scheme.group else 1
        scales, self.rate = (1, ROW_RATE) if scheme.steps else (self.groups, SCALE_RATE)
        self.growth = nn.Parameter(torch.zeros(out_features, scales, device=device))
        self.register_buffer("begun_scale", torch.ones(out_features, scales, device=device))
        if scheme.steps:
            self.register_buffer("step", torch.ones(out_features, self.groups, device=device))
        if scheme.offsets or scheme.steps:
            self.shift = nn.Parameter(torch.zeros(out_features, self.groups, device=device))
            self.register_buffer("begun_offset", torch.zeros(out_features, self.groups, device=device))

    @property
    def stored_type(self) -> torch.dtype:
        """What scales and offsets are stored in."""
        if self.scheme.bits == 8:
            return torch.float32
        return torch.float16 if self.scheme.offsets else torch.bfloat16

    def grid(self) -> tuple[Tensor, Tensor | None]:
        """Scales and offsets, shaped as `growth` and `shift`, float32, of values that can be stored; gradients pass as
        if they were not rounded to these. Beside whole steps an offset is a whole number too."""
        scale_NG = self.begun_scale * (self.growth * self.rate).exp()
        if self.scheme.steps:
            offset_NG = self.begun_offset + self.shift * OFFSET_RATE * self.step
            highest_NG = INT8_LIMIT - LARGEST_NUMBER * self.step
            whole_NG = offset_NG.detach().round().clamp(min=-INT8_LIMIT).minimum(highest_NG)
            return scale_NG, offset_NG + (whole_NG - offset_NG.detach())
        if not self.scheme.offsets:
            return self._storable(scale_NG), None
        offset_NG = self.begun_offset + self.shift * OFFSET_RATE * self.begun_scale
        return self._storable(scale_NG.clamp(min=LEAST_SCALE)), self._storable(offset_NG)

    def _storable(self, x: Tensor) -> Tensor:
        return x + (x.detach().to(self.stored_type).to(torch.float32) - x.detach())

    def rounded_weight(self) -> Tensor:
        """(out_features, in_features) float32: what `forward` multiplies with."""
        scale_NG, offset_NG = self.grid()
        step_NG = self.step if self.scheme.steps else scale_NG
        middle_NG1 = None if offset_NG is None else (offset_NG + OFFSET * step_NG)[..., None]
        weight_NGB: Tensor = _Weight.apply(self._steps(), step_NG[..., None], middle_NG1, self.values)  # pyright: ignore[reportAssignmentType]
        weight_NK = weight_NGB.flatten(1)
        return weight_NK * scale_NG if self.scheme.steps else weight_NK  # what is in steps is whole numbers until here

    def _steps(self) -> Tensor:
        """(out_features, groups, inputs of a group): what is rounded, in steps."""
        if self.scheme.bits == 8:
            unit_NG = self.unit * (self.growth * self.rate).exp()
        else:
            unit_NG = torch.full_like(self.growth, self.unit)
        return self.weight.unflatten(1, (self.groups, -1)) / unit_NG[..., None]

    @torch.no_grad()
    def begin(self, weight_NK: Tensor, stored: Stored) -> None:
        """Take the float weights as far as they round to the integers of `stored`, and its grid.

        Of 4 bits a weight that would round to another integer begins at that of `stored`. Compensated rounding moves a
        large share of them; from the edge of their step they would leave it together, in the first updates.
        """
        offset_NG, integers_NK = None, stored.number_NK if isinstance(stored, SteppedWeight) else stored.weight_NK
        if isinstance(stored, GroupedWeight):
            scale_NG, offset_NG = stored.scale_NG, stored.offset_NG
        else:
            scale_NG = stored.scale_N1
        self.begun_scale.copy_(scale_NG)
        self.growth.zero_()
        step_NG, apart_NGB = self.begun_scale, weight_NK.unflatten(1, (self.groups, -1))
        if isinstance(stored, SteppedWeight):
            step_NG, offset_NG = self.step.copy_(stored.step_NG), stored.offset_NG
            apart_NGB = apart_NGB / self.begun_scale[..., None]
        if offset_NG is not None:
            self.begun_offset.copy_(offset_NG)
            self.shift.zero_()
            apart_NGB = apart_NGB - (self.begun_offset + OFFSET * step_NG)[..., None]
        steps_NK = (apart_NGB / step_NG[..., None]).flatten(1)
        apart_NK = steps_NK - integers_NK
        if self.scheme.bits == 8:
            near_NK = integers_NK + apart_NK.clamp(-INSIDE, INSIDE)
        else:
            near_NK = integers_NK + torch.where(apart_NK.abs() < INSIDE, apart_NK, 0)
        self.weight.copy_(near_NK.clamp(self.values.low + EDGE, self.values.high - EDGE) * self.unit)

    @torch.no_grad()
    def quantized(self) -> Stored:
        """The integers and the grid whose products `forward` multiplies with."""
        integers_NK = self.values.store(self._steps()).flatten(1).to(torch.int8)
        scale_NG, offset_NG = self.grid()
        if self.scheme.bits == 8:
            return QuantizedWeight(integers_NK, scale_NG)
        if self.scheme.steps:
            assert offset_NG is not None
            return SteppedWeight(integers_NK, self.step.to(torch.int8), offset_NG.to(torch.int8), scale_NG)
        stored_NG = None if offset_NG is None else offset_NG.to(self.stored_type)
        return GroupedWeight(integers_NK, scale_NG.to(self.stored_type), stored_NG)

    def forward(self, input: Tensor) -> Tensor:
        rounded: Tensor = _Activation.apply(input, self.scheme)  # pyright: ignore[reportAssignmentType]
        return F.linear(rounded, self.rounded_weight(), self.bias)


class FixedLinear(nn.Linear):
    """`Int8Linear` whose integers do not learn, beside layers that do; (…, in_features) → (…, out_features).

    Attributes:
        weight: (out_features, in_features) what the integers stand for, without a gradient.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, device: torch.device | None, scheme: Scheme
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.scheme = scheme

    @torch.no_grad()
    def begin(self, weight_NK: Tensor, stored: Stored) -> None:
        """Take the integers of `stored`, and nothing of the float weights."""
        self.weight.copy_(stored.dequantize())

    def forward(self, input: Tensor) -> Tensor:
        rounded: Tensor = _Activation.apply(input, self.scheme)  # pyright: ignore[reportAssignmentType]
        return F.linear(rounded, self.weight, self.bias)


def apply_rounding(model: nn.Module, schemes: Mapping[str, Scheme], fixed: Collection[str] = ()) -> None:
    """Replace the linear layers `schemes` of `model`; their weights mean nothing until `begin`.

    Args:
        schemes: module name → how it is rounded.
        fixed: those of them that do not learn, bias included.
    """
    for name, scheme in schemes.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        kind = FixedLinear if name in fixed else RoundedLinear
        replacement = kind(layer.in_features, layer.out_features, layer.bias is not None, layer.weight.device, scheme)
        if layer.bias is not None:
            replacement.bias = layer.bias
        model.set_submodule(name, replacement.requires_grad_(name not in fixed))


def rounded_layers(model: nn.Module) -> dict[str, RoundedLinear]:
    """The layers that `apply_rounding` made to learn, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, RoundedLinear)}


def begin_all(
    model: nn.Module,
    floating: nn.Module,
    tensor: Callable[[str], Tensor],
    smoothed: Mapping[str, Tensor] | None = None,
) -> None:
    """Give `model` the weights of `floating`, and its rounded layers the integers of an artifact.

    Args:
        floating: the same network without `apply_rounding`.
        tensor: tensor name → tensor of the artifact.
        smoothed: layer → (in_features,) what the artifact multiplies its columns with and `floating` does not.
    """
    unknown = model.load_state_dict(floating.state_dict(), strict=False).unexpected_keys
    assert not unknown, unknown
    for name, layer in model.named_modules():
        if isinstance(layer, RoundedLinear | FixedLinear):
            weight_NK = floating.get_parameter(f"{name}.weight").detach()
            if smoothed is not None and name in smoothed:
                weight_NK = weight_NK * smoothed[name]
            layer.begin(weight_NK, _stored(name, layer.scheme, tensor))


def _stored(name: str, scheme: Scheme, tensor: Callable[[str], Tensor]) -> Stored:
    scale = tensor(f"{name}.weight_scale")
    if scheme.bits == 8:
        return QuantizedWeight(tensor(f"{name}.weight"), scale)
    integers_NK = unpack_int4(tensor(f"{name}.weight_packed"))
    if scheme.steps:
        return SteppedWeight(integers_NK, tensor(f"{name}.weight_step"), tensor(f"{name}.weight_offset"), scale)
    return GroupedWeight(integers_NK, scale, tensor(f"{name}.weight_offset") if scheme.offsets else None)
