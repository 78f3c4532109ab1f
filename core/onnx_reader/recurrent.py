"""LSTM, GRU and RNN of ONNX by torch's own, whose gates stand in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penjing.core.onnx_reader.values import Call

_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""Where torch's gates (LSTM: i f g o, GRU: r z n) stand in ONNX (LSTM: i o f c, GRU: z r h)."""
_USUAL = {"LSTM": ["sigmoid", "tanh", "tanh"], "GRU": ["sigmoid", "tanh"], "RNN": ["tanh"]}


def _recurrent(call: Call) -> tuple[Tensor, ...]:
    kind, hidden = call.node.op_type, call.attribute("hidden_size")
    way = call.attribute("direction", "forward")
    ways = 2 if way == "bidirectional" else 1
    _check(call, kind, ways)
    x = call.tensor(0)
    batch_first = bool(call.attribute("layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    x = x.flip(0) if way == "reverse" else x
    weights: list[Tensor] = []
    for side in range(ways):
        weights += [
            call.changed(1, f"input_{side}", lambda value, side=side: _ordered(value[side], kind)),
            call.changed(2, f"hidden_{side}", lambda value, side=side: _ordered(value[side], kind)),
        ]
        if call.has(3):
            weights += [
                call.changed(3, f"input_{side}", lambda value, side=side: _ordered(value[side].chunk(2)[0], kind)),
                call.changed(3, f"hidden_{side}", lambda value, side=side: _ordered(value[side].chunk(2)[1], kind)),
            ]
    start = [_start(call, index, x, ways, hidden, batch_first) for index in ((5, 6) if kind == "LSTM" else (5,))]
    settings: tuple[Any, ...] = (weights, call.has(3), 1, 0.0, False, ways == 2, False)
    if kind == "LSTM":
        y, *last = torch.lstm(x, start, *settings)
    elif kind == "GRU":
        y, *last = torch.gru(x, start[0], *settings)
    else:
        relu = call.attribute("activations", ["Tanh"])[0].lower() == "relu"
        y, *last = (torch.rnn_relu if relu else torch.rnn_tanh)(x, start[0], *settings)
    y = y.reshape(y.shape[0], -1, ways, hidden)
    y = y.flip(0) if way == "reverse" else y
    if batch_first:
        return y.transpose(0, 1), *[state.transpose(0, 1) for state in last]
    return y.transpose(1, 2), *last


def _check(call: Call, kind: str, ways: int) -> None:
    usual = [_USUAL[kind]] + ([["relu"]] if kind == "RNN" else [])
    names = [name.lower() for name in call.attribute("activations", _USUAL[kind] * ways)]
    odd = [name for name in ("clip", "input_forget") if call.attribute(name)]
    odd += [name for index, name in ((4, "sequence_lens"), (7, "peepholes")) if call.has(index)]
    if kind == "GRU" and not call.attribute("linear_before_reset", 0):
        odd.append("linear_before_reset = 0")
    if names not in [found * ways for found in usual]:
        odd.append(f"the activations {', '.join(names)}")
    if any(call.constant(index) is None for index in ((1, 2, 3) if call.has(3) else (1, 2))):
        odd.append("weights that are computed")
    if odd:
        raise call.refused(f"has {odd[0]}, which penjing does not compute")


def _ordered(weight: Tensor, kind: str) -> Tensor:
    gates = weight.chunk(len(_ORDER[kind]))
    return torch.cat([gates[place] for place in _ORDER[kind]])


def _start(call: Call, index: int, x: Tensor, ways: int, hidden: int, batch_first: bool) -> Tensor:
    if not call.has(index):
        return x.new_zeros(ways, x.shape[1], hidden)
    state = call.tensor(index)
    return state.transpose(0, 1) if batch_first else state


OPERATORS: dict[str, Callable[[Call], Any]] = dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent)
