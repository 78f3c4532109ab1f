"""Whether the layers of a decoder step have the shapes of one decoder."""

from __future__ import annotations

from collections.abc import Sequence

from penjing.kernels.int4_linear import PackedInt4
from penjing.kernels.int8_linear import PackedInt8
from penjing.kernels.step_layers import GATED, LayerWeights, groups_of, size, stored_unlike, widest_expert


def check_layers(layers: Sequence[LayerWeights], hidden: int, num_heads: int, q_size: int, kv_size: int) -> None:
    """Raise ValueError unless all layers have the shapes of one decoder."""
    if not layers:
        raise ValueError("a decoder without layers")
    for index, layer in enumerate(layers):
        inner = size(layer.gate)[0]
        if (layer.out_norm is None) != (layer.down_norm is None):
            raise ValueError(f"layer {index}: of out_norm and down_norm one is missing")
        if layer.experts is not None:
            _check_experts(index, layer, hidden, inner)
        elif layer.up is not None and layer.activation not in GATED:
            raise ValueError(f"layer {index}: {layer.activation} of a gate; possible are {', '.join(GATED)}")
        if layer.parallel and layer.out_norm is not None:
            raise ValueError(f"layer {index}: parallel, with norms behind attention and MLP")
        if layer.taps is not None:
            _check_convolution(index, layer, hidden)
        elif layer.keys_of is not None:
            _check_borrowed(index, layer, layers)
        elif layer.k is None or layer.v is None:
            raise ValueError(f"layer {index}: k or v is missing, and there are no taps")
        _check_token(index, layer, hidden, layers[0])
        gates = 0 if layer.head_gate is None else size(layer.head_gate)[0]
        if gates not in (0, num_heads, q_size):
            raise ValueError(f"layer {index}: {gates} gates; one for each of {num_heads} heads or {q_size} channels")
        shapes = {
            "q": (q_size if layer.taps is None else 3 * hidden, hidden),
            "k": (kv_size, hidden),
            "v": (kv_size, hidden),
            "head_gate": (gates, hidden),
            "out": (hidden, q_size if layer.taps is None else hidden),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        for name, shape in shapes.items():
            linear = getattr(layer, name)
            if linear is not None and size(linear) != shape:
                raise ValueError(f"layer {index}: {name} has shape {size(getattr(layer, name))}; {shape} is needed")
        for group in groups_of([layer]):
            fours = [linear for linear in group if isinstance(linear, PackedInt4)]
            if len(widths := {linear.group for linear in fours}) > 1:
                raise ValueError(f"layer {index}: INT4 layers of one input have groups of {sorted(widths)} inputs")
            if len({linear.zero_points for linear in group if isinstance(linear, PackedInt8)}) > 1:
                raise ValueError(f"layer {index}: of INT8 layers of one input some have zero points and some have none")
            if len({linear.offset_NG is None for linear in fours}) > 1:
                raise ValueError(f"layer {index}: of INT4 layers of one input some have offsets and some have none")
            if len({linear.activation_bits for linear in fours}) > 1:
                raise ValueError(f"layer {index}: INT4 layers of one input read INT8 and bfloat16")


def _check_experts(index: int, layer: LayerWeights, hidden: int, inner: int) -> None:
    experts = layer.experts
    assert experts is not None
    count = len(experts.gates)
    if layer.hadamard or layer.up is None or layer.inner_norm is not None:
        raise ValueError(f"layer {index}: experts have a gate, no norm inside and no transform")
    if layer.activation not in ("silu", "gelu_tanh", "clamped_swiglu"):
        raise ValueError(f"layer {index}: {layer.activation} of experts is not known")
    routed = count - experts.shared
    rows = routed + experts.shared_gate
    if size(experts.router) != (rows, hidden) or not 1 <= experts.per_row <= routed or rows > count:
        raise ValueError(f"layer {index}: {routed} experts, {experts.per_row} a row, router {size(experts.router)}")
    if experts.bias is not None and experts.bias.shape != (routed,):
        raise ValueError(f"layer {index}: the bias of {routed} experts has shape {tuple(experts.bias.shape)}")
    if experts.margin is not None and (experts.per_row != 2 or experts.shared):
        raise ValueError(f"layer {index}: margin is of two experts a row, and none beside them")
    norms = [each for each in (experts.sum_norm, experts.shared_norm) if each is not None]
    if norms and (not experts.shared or experts.shared_gate or [each.shape for each in norms] != [(hidden,)] * 2):
        raise ValueError(f"layer {index}: sum_norm and shared_norm are ({hidden},) both, beside a shared expert")
    widest = widest_expert(layer)
    if widest < inner or (widest > inner and not experts.shared):
        raise ValueError(f"layer {index}: the last expert is {widest} wide, others {inner}")
    for name, linears in (("gates", experts.gates), ("ups", experts.ups), ("downs", experts.downs)):
        found = [size(linear)[:: -1 if name == "downs" else 1] for linear in linears]
        expected = [(inner, hidden)] * (count - 1) + [(widest, hidden)]
        if found != expected:
            raise ValueError(f"layer {index}: {name} of experts have {sorted(set(found))}; {expected[0]} is needed")
    if stored_unlike(experts):
        raise ValueError(f"layer {index}: experts must be stored alike")


def _check_convolution(index: int, layer: LayerWeights, hidden: int) -> None:
    assert layer.taps is not None
    if layer.taps.dim() != 2 or layer.taps.shape[0] != hidden or layer.taps.shape[1] < 1:
        raise ValueError(f"layer {index}: taps have shape {tuple(layer.taps.shape)}; ({hidden}, taps) is needed")
    others = ("k", "v", "q_norm", "k_norm", "v_norm", "sinks", "window", "attended_norm", "head_gate")
    if found := [name for name in others if getattr(layer, name) is not None]:
        raise ValueError(f"layer {index}: a convolution has no {', '.join(found)}")


def _check_borrowed(index: int, layer: LayerWeights, layers: Sequence[LayerWeights]) -> None:
    assert layer.keys_of is not None
    lender = layers[layer.keys_of] if 0 <= layer.keys_of < index else None
    if lender is None or lender.k is None or lender.taps is not None:
        raise ValueError(f"layer {index}: keys_of={layer.keys_of} is no layer before it that has keys")
    if found := [name for name in ("k", "v", "k_norm", "v_norm", "head_gate") if getattr(layer, name) is not None]:
        raise ValueError(f"layer {index}: with keys of another layer it has no {', '.join(found)}")


def _check_token(index: int, layer: LayerWeights, hidden: int, first: LayerWeights) -> None:
    if (layer.token is None) != (first.token is None):
        raise ValueError(f"layer {index}: some layers take something of a token, and some do not")
    if layer.token is None or first.token is None:
        return
    width = size(first.token[0])[0]
    if (size(layer.token[0]), size(layer.token[1])) != ((width, hidden), (hidden, width)):
        raise ValueError(f"layer {index}: what takes of a token has other sizes than ({width}, {hidden}) and back")
