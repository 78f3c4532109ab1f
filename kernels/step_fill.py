"""The layers of a decoder step as the C++ extension reads them: structures that point to packed weights and vectors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from penjing.kernels.activation import ACTIVATIONS
from penjing.kernels.attention_gate import GATE_FUNCTIONS
from penjing.kernels.cpu import library as abi
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.hadamard import check_block
from penjing.kernels.screen import Screen
from penjing.kernels.step_layers import LayerWeights, Packer, fill_experts, gate_up, mixers, size


def fill_layers(
    layers: Sequence[LayerWeights], packer: Packer, hidden: int, num_heads: int, head_dim: int
) -> ctypes.Array[abi.Layer]:
    """Pack the weights of `layers`, which `step_checks.check_layers` has seen.

    Raises:
        ValueError: vectors that do not fit.
    """
    filled = (abi.Layer * len(layers))()
    places = [0, 0]  # of layers with attention, and of those with convolutions
    for out, layer in zip(filled, layers, strict=True):
        kind = layer.taps is not None
        out.place = places[kind] if layer.keys_of is None else filled[layer.keys_of].place
        places[kind] += layer.keys_of is None
        _fill(out, layer, packer, hidden, num_heads, head_dim)
    return filled


def optional_vector(tensor: Tensor | None, size: int | None, kept: list[object]) -> int | None:
    """The address of `tensor` in float32, in memory that `kept` keeps; None where there is none.

    Raises:
        ValueError: it has another shape than (size,).
    """
    if tensor is None:
        return None
    if tensor.shape != (size,):
        raise ValueError(f"a norm, sinks or a bias has shape {tuple(tensor.shape)}; ({size},) is needed")
    vector = tensor.detach().float().contiguous()
    kept.append(vector)
    return vector.data_ptr()


def _fill(out: abi.Layer, layer: LayerWeights, packer: Packer, hidden: int, num_heads: int, head_dim: int) -> None:
    def vector(tensor: Tensor | None, size: int | None) -> int | None:
        return optional_vector(tensor, size, packer.kept)

    out.num_qkv = packer.fill(out.qkv, mixers(layer))
    out.out = packer.pack([layer.out])
    clamped = layer.activation == "clamped_swiglu"
    out.activation = len(ACTIVATIONS) if clamped else ACTIVATIONS.index(layer.activation)
    out.gated = layer.up is not None
    out.curve[:] = layer.curve
    out.parallel, out.scale = layer.parallel, layer.scale
    if layer.experts is not None:
        fill_experts(out, layer, packer)
    else:
        out.num_gate_up = packer.fill(out.gate_up, gate_up(layer), layer.activation)
        out.down = packer.pack([layer.down])
    for name in ("input_norm", "post_norm", "out_norm", "down_norm"):
        setattr(out, name, vector(getattr(layer, name), hidden))
    if layer.token is not None:
        gate, made, norm = layer.token
        out.token_gate, out.token_out = (packer.pack([each]) for each in (gate, made))
        out.token_norm = vector(norm, hidden)
    out.borrows = layer.keys_of is not None
    if layer.taps is None:
        whole = layer.whole_norm
        out.q_norm = vector(layer.q_norm, size(layer.q)[0] if whole else head_dim)
        of_keys = None if layer.k is None else size(layer.k)[0]
        out.k_norm = vector(layer.k_norm, of_keys if whole else head_dim)
        lacks = layer.q_norm is None or (layer.k_norm is None and layer.k is not None)
        if whole and (lacks or layer.norm_rotated):
            raise ValueError("whole_norm needs q_norm and k_norm, before the rotation")
        out.v_norm = vector(layer.v_norm, head_dim)
        out.whole_norm, out.norm_rotated, out.rotary = whole, layer.norm_rotated, layer.rotary
        out.sinks = vector(layer.sinks, num_heads)
    if layer.head_gate is not None:
        out.gates, out.gate_function = size(layer.head_gate)[0], GATE_FUNCTIONS[layer.gate_function]
    if layer.taps is not None:
        taps_EK = layer.taps.detach().float().contiguous()
        packer.kept.append(taps_EK)
        out.taps, out.num_taps = taps_EK.data_ptr(), taps_EK.shape[1]
        out.tap_bias = vector(layer.tap_bias, hidden)
    out.attended_norm = vector(layer.attended_norm, size(layer.out)[1])
    out.inner_norm = vector(layer.inner_norm, size(layer.down)[1])
    if layer.window is not None and layer.window < 1:
        raise ValueError(f"window={layer.window}: at least 1 key is needed")
    out.window = layer.window or 0
    if layer.hadamard:
        check_block(layer.hadamard, size(layer.down)[1])
    out.hadamard = layer.hadamard


def describe_screen(screen: Screen, extension: CpuExtension, kept: list[object]) -> abi.Screen:
    """The copy of an LM head, packed; `kept` gets what the description points to."""
    rough = Packer(extension, kept, [[screen.rough]]).pack([screen.rough])
    vectors = screen.directions_DE, screen.factors_D, screen.lost_V
    addresses = [vector.data_ptr() for vector in vectors]
    described = abi.Screen(rough, *addresses, len(screen.factors_D), screen.beside)
    kept += [*vectors, described]
    return described
