"""The linear layers of a decoder step: their kinds, and how those of one input are packed as one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penjing.kernels.activation import Activation
from penjing.kernels.attention_gate import GateFunction
from penjing.kernels.cpu import library as abi
from penjing.kernels.cpu.checks import float_linear
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.packing import Panels
from penjing.kernels.int4_linear import FLOATING, PackedInt4
from penjing.kernels.int8_linear import PackedInt8
from penjing.kernels.low_rank import LINE, PROJECTIONS


@dataclass(frozen=True)
class FloatLinear:
    """A linear layer in float32, bfloat16 or float16; the weight is used in place."""

    weight_NK: Tensor  # noqa: N815
    bias_N: Tensor | None = None  # noqa: N815


@dataclass(frozen=True, eq=False)
class Int8Table:
    """An embedding in INT8; with `channel_E` it is the LM head's weight too."""

    weight_VE: Tensor  # noqa: N815  int8, contiguous
    scale_V: Tensor  # noqa: N815  float32
    channel_E: Tensor | None = None  # noqa: N815  float32, what a looked-up row's channels are multiplied by

    def rows(self, token_ids: Tensor) -> Tensor:
        """(…) int64 → (…, E) float32."""
        rows = self.weight_VE[token_ids].to(torch.float32) * self.scale_V[token_ids].unsqueeze(-1)
        return rows if self.channel_E is None else rows * self.channel_E


AnyLinear = PackedInt8 | PackedInt4 | FloatLinear
GATED = ("silu", "gelu_tanh", "relu2")
"""Activations of a gate that packed layers of gate and up compute, in the order of PjLinear's numbers."""


@dataclass(frozen=True)
class ExpertLayers:
    """Experts in place of an MLP, each with a gate, the product beside it, and what leads back.

    Attributes:
        router: (experts without the shared one, hidden) in floating point; with `shared_gate` a row more.
        per_row: how many a token goes to, those with the largest scores: softmax of the router's outputs.
        normed: their weights are their scores divided by the sum of these.
        factor: of the weights.
        logistic: scores are the logistic function of the router's outputs.
        margin: two are weighed as `_sparsemixer` of `core.models.moe` does; None: as the other fields say.
        bias: (experts without the shared one,) float32, added to scores for the choice alone.
        bias_of_logits: it is added to the router's outputs, before they are scores.
        shared: the last expert takes each token besides, with the weight 1; it may be wider than the others.
        shared_gate: its weight is the logistic function of the router's last output.
        sum_norm, shared_norm: (hidden,) norms of what the chosen ones give together, and of what the shared one gives
            with the weight 1, before both are added; None: neither.
    """

    router: FloatLinear
    gates: Sequence[AnyLinear]
    ups: Sequence[AnyLinear]
    downs: Sequence[AnyLinear]
    per_row: int
    normed: bool = True
    factor: float = 1.0
    logistic: bool = False
    bias: Tensor | None = None
    shared: bool = False
    shared_gate: bool = False
    margin: float | None = None
    bias_of_logits: bool = False
    sum_norm: Tensor | None = None
    shared_norm: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norm weights are (hidden,), head norms (head_dim,) or, over all heads at once, (heads ×
    head_dim,); None: there is none. Window in keys, None: all. A layer with a short convolution in place of attention
    has `taps`, and no k and v: q gives what gates its input, what gates its result, and the input, (3 × hidden)."""

    q: AnyLinear
    k: AnyLinear | None
    v: AnyLinear | None
    out: AnyLinear
    gate: AnyLinear
    up: AnyLinear | None
    """None: the MLP is down(activation(gate(x)))."""
    down: AnyLinear
    input_norm: Tensor | None
    post_norm: Tensor | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None
    window: int | None = None
    hadamard: int = 0
    """Block of the transform of the input of `down` (`kernels.hadamard`); 0: none."""
    out_norm: Tensor | None = None
    down_norm: Tensor | None = None
    """Both or none: norms of what attention and MLP add to the residual."""
    whole_norm: bool = False
    """Whether the head norms span all heads of a token."""
    norm_rotated: bool = False
    """Whether they come after the rotation."""
    activation: Activation | Literal["clamped_swiglu"] = "silu"
    """Of the gate; with `up` one of GATED, of experts silu, gelu_tanh or clamped_swiglu (`kernels.swiglu`)."""
    experts: ExpertLayers | None = None
    """Then gate, up and down are those of the first one."""
    attended_norm: Tensor | None = None
    """(heads × head_dim,): of what `out` reads."""
    inner_norm: Tensor | None = None
    """(inner,): of what `down` reads, before its transform; experts have none."""
    sinks: Tensor | None = None
    """(heads,): a score more in each sum that attention divides by."""
    head_gate: AnyLinear | None = None
    """Gates of what attention gives, before `attended_norm`: one a head, or one a channel."""
    gate_function: GateFunction = "sigmoid"
    curve: tuple[float, float] = (0.0, 0.0)
    """Of xielu."""
    parallel: bool = False
    """Whether the MLP reads what attention reads, and both are added."""
    scale: float = 1.0
    """Of what leaves the layer."""
    keys_of: int | None = None
    """The layer whose keys and values it reads, where k and v are None."""
    token: tuple[AnyLinear, AnyLinear, Tensor] | None = None
    """(width, hidden), (hidden, width) and (hidden,): what reads the residual behind the MLP, what reads its GELU times
    what the layer takes of a token, and the norm of what that gives."""
    rotary: int = 0
    """Row of the frequencies that the layer rotates by."""
    taps: Tensor | None = None
    """(hidden, taps) factors of the channels of the last tokens, the last one's own."""
    tap_bias: Tensor | None = None
    """(hidden,): added to their sum."""


class Packer:
    """Packs INT8 and INT4 layers one behind the other, in the order they are used: the processor prefetches across
    layers."""

    def __init__(self, extension: CpuExtension, kept: list[object], groups: Iterable[Sequence[AnyLinear]]):
        self.extension, self.kept, self.used = extension, kept, 0
        total = 0
        for group in groups:
            together = [group] if joins(group) else [[linear] for linear in group]
            total += sum(
                _lines(self._needed(one, len(one) == 2)) for one in together if not isinstance(one[0], FloatLinear)
            )
        self.memory = extension.empty_pages((total,), torch.uint8)
        kept.append(self.memory)

    def pack(self, group: Sequence[AnyLinear], swiglu: bool = False) -> abi.Linear:
        """The layers of `group`, their outputs one behind the other, as one; a float layer comes alone."""
        (first, *_) = group
        if isinstance(first, FloatLinear):
            weight = first.weight_NK.detach()
            bias = None if first.bias_N is None else first.bias_N.detach().float().contiguous()
            self.kept += [weight, bias]
            return float_linear(weight, bias)
        needed = self._needed(group, swiglu)
        memory = self.memory[self.used : self.used + needed]
        self.used += _lines(needed)
        if isinstance(first, PackedInt4):
            fours = [linear for linear in group if isinstance(linear, PackedInt4)]
            parts = [linear.part for linear in fours]
            floats = first.activation_bits == FLOATING
            packed = self.extension.prepack_int4(parts, first.group, swiglu=swiglu, memory=memory, half_inputs=floats)
            return packed.linear
        eights = [linear for linear in group if isinstance(linear, PackedInt8)]
        stepped = [part for linear in eights if (part := linear.stepped_part) is not None]
        above = eights[0].zero_points
        if stepped:
            more = {"swiglu": swiglu, "memory": memory, "zero_points": above}
            return self.extension.prepack_stepped(stepped, eights[0].group, **more).linear
        parts = [(linear.weight_NK, linear.scale_N, linear.bias_N) for linear in eights]
        return self.extension.prepack_parts(parts, swiglu=swiglu, memory=memory, zero_points=above).linear

    def fill(self, slots: ctypes.Array[abi.Linear], group: Sequence[AnyLinear], activation: str = "silu") -> int:
        """Projections of one input, as one packed layer where they join (a gate and its product); the slots used."""
        if joins(group):
            pair = len(group) == 2
            slots[0] = self.pack(group, swiglu=pair)
            if pair:
                slots[0].swiglu = 1 + GATED.index(activation)
            return 1
        for i, linear in enumerate(group):
            slots[i] = self.pack([linear])
        return len(group)

    def _needed(self, group: Sequence[AnyLinear], swiglu: bool) -> int:
        first = group[0]
        columns = sum(size(linear)[0] for linear in group)
        columns = columns // 2 if swiglu else columns
        if isinstance(first, PackedInt4):
            sizes = columns, first.in_features, first.group, first.scale_NG.dtype
            return self.extension.packed_int4_bytes(*sizes, swiglu, first.offset_NG is not None)
        above = isinstance(first, PackedInt8) and first.zero_points
        if isinstance(first, PackedInt8) and first.group:
            return self.extension.packed_stepped_bytes(columns, first.in_features, first.group, swiglu, above)
        return self.extension.packed_bytes(columns, size(first)[1], swiglu, above)


def _lines(size: int) -> int:
    """Bytes that end where the next layer may begin: an odd number of groups of 16 columns ends amid a cache line."""
    return -(-size // LINE) * LINE


def pack_together(extension: CpuExtension, linears: Sequence[PackedInt8 | PackedInt4]) -> list[Panels]:
    """Each of `linears` as the extension wants it, in one piece of memory: alone, each would begin at a huge page."""
    packer = Packer(extension, [], [[linear] for linear in linears])
    return [Panels(packer.pack([each]), packer.memory, each.in_features, each.out_features) for each in linears]


def joins(group: Sequence[AnyLinear]) -> bool:
    """Whether layers of one input are packed as one: all INT8, as bytes or in 4 bits with the same groups, or all INT4
    with the same groups, type of scales and offsets or none. Activations of INT4 layers have as many bits, which
    `step_checks.check_layers` has seen."""
    eights = [linear for linear in group if isinstance(linear, PackedInt8)]
    if len(eights) == len(group):
        return len({linear.group for linear in eights}) == 1  # `check_layers` has seen zero points: all or none
    fours = [linear for linear in group if isinstance(linear, PackedInt4)]
    forms = {(linear.group, linear.scale_NG.dtype, linear.offset_NG is None) for linear in fours}
    return len(fours) == len(group) and len(forms) == 1


def groups_of(layers: Sequence[LayerWeights]) -> Iterable[Sequence[AnyLinear]]:
    """Layers of the same input, layer by layer."""
    for layer in layers:
        yield from (mixers(layer), (layer.out,))
        if layer.token is not None:
            yield from ((each,) for each in layer.token[:2])
        if layer.experts is None:
            yield from (gate_up(layer), (layer.down,))
            continue
        for pair in zip(layer.experts.gates, layer.experts.ups, strict=True):
            yield from (pair,) if layer.activation != "clamped_swiglu" else ((each,) for each in pair)
        yield from ((down,) for down in layer.experts.downs)


def mixers(layer: LayerWeights) -> Sequence[AnyLinear]:
    """What before attention, or the convolution in its place, reads the residual."""
    return tuple(linear for linear in (layer.q, layer.k, layer.v, layer.head_gate) if linear is not None)


def gate_up(layer: LayerWeights) -> Sequence[AnyLinear]:
    """What of the MLP reads the residual."""
    return (layer.gate,) if layer.up is None else (layer.gate, layer.up)


def projections(layer: LayerWeights) -> dict[str, tuple[int, int]]:
    """Sizes of what an adapter may stand beside, by their names; experts have none."""
    names = PROJECTIONS if layer.experts is None else PROJECTIONS[:5]
    return {name: size(linear) for name in names if (linear := getattr(layer, name)) is not None}


def size(linear: AnyLinear) -> tuple[int, int]:
    """(out_features, in_features)."""
    if isinstance(linear, FloatLinear):
        return linear.weight_NK.shape[0], linear.weight_NK.shape[1]
    return linear.out_features, linear.in_features


def fill_experts(out: abi.Layer, layer: LayerWeights, packer: Packer) -> None:
    """Pack the experts of `layer`; its first one also stands where an MLP would."""
    experts = layer.experts
    assert experts is not None
    together = layer.activation != "clamped_swiglu" and joins(gate_up(layer))
    count, apart = len(experts.gates), 1 if together else 2
    gate_ups, downs = (abi.Linear * (apart * count))(), (abi.Linear * count)()
    for index, pair in enumerate(zip(experts.gates, experts.ups, strict=True)):
        slots = (abi.Linear * 2)()
        if together:
            packer.fill(slots, pair, layer.activation)
        else:
            slots[0], slots[1] = (packer.pack([each]) for each in pair)
        gate_ups[apart * index : apart * (index + 1)] = slots[:apart]
    for index, down in enumerate(experts.downs):
        downs[index] = packer.pack([down])
    vectors = [
        None if each is None else each.detach().float().contiguous()
        for each in (experts.bias, experts.sum_norm, experts.shared_norm)
    ]
    bias, sum_norm, shared_norm = (None if each is None else each.data_ptr() for each in vectors)
    made = abi.Experts(
        router=packer.pack([experts.router]),
        gate_up=gate_ups,
        down=downs,
        bias=bias,
        sum_norm=sum_norm,
        shared_norm=shared_norm,
        num_experts=count,
        per_row=experts.per_row + experts.shared,
        factor=experts.factor,
        margin=-1.0 if experts.margin is None else experts.margin,
        normed=experts.normed,
        logistic=experts.logistic,
        bias_of_logits=experts.bias_of_logits,
        shared=experts.shared,
    )
    packer.kept += [gate_ups, downs, made, *vectors]
    out.experts, out.num_gate_up = ctypes.pointer(made), apart
    out.gate_up[:apart], out.down = gate_ups[:apart], downs[0]


def widest_expert(layer: LayerWeights) -> int:
    """Inner width of the MLP, or of the last expert, than which no other is wider."""
    return size(layer.gate if layer.experts is None else layer.experts.gates[-1])[0]


def stored_unlike(experts: ExpertLayers) -> bool:
    """Whether some experts have other bits, groups or zero points than others, so that their rows do not lie alike."""
    trios = zip(experts.gates, experts.ups, experts.downs, strict=True)
    return len({tuple(map(_form, trio)) for trio in trios}) > 1


def _form(linear: AnyLinear) -> tuple[object, ...]:
    if isinstance(linear, PackedInt8):
        return 8, linear.group, linear.zero_points
    if isinstance(linear, PackedInt4):
        return 4, linear.group, linear.scale_NG.dtype, linear.offset_NG is None, linear.activation_bits
    return (linear.weight_NK.dtype,)
