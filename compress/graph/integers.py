"""A stored graph computed in torch as ONNX Runtime's integer kernels compute it, roundings included.

A network of 53 convolutions turns a single number that is rounded the other way into another answer: each layer
enlarges it. In floating point a sum depends on its order, so two correct programs round a few numbers in a million
differently, and the answers of OpenNSFW moved by a tenth of what they vary. Integers have no order. So sums of
products are exact here, and what follows a sum is the one multiplication in 32 bits that the kernels do:

- a convolution: round(float32(sum + bias) · (input scale · weight scale / output scale)) + zero point;
- an addition: fma(a, a's scale / output scale, fma(b, b's scale / output scale, rest)), where the rest holds the zero
  points (MLAS, `qladd`; on x64 its multiplications and additions are fused).

Everything else, and what is rounded to FP8, is computed as the graph says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from penjing.compress.graph.place import CONVOLUTIONS, FUSED
from penjing.compress.rounding.stored import QUANTIZED, WIDENED
from penjing.core.graph.network import Network, operator_name, tensor_at

Integers = tuple[Tensor, Tensor, int]  # what is stored less the zero point, its scale, its zero point


class IntegerRun(fx.Interpreter):
    """Runs a network as `stored` made it; `codes` then holds what each pair stores.

    Attributes:
        codes: of each rounding, in order, what is stored less the zero point: float16, which holds 8 bits exactly.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network.module)
        self.codes: list[Tensor] = []
        self._network = network
        self._stored: dict[Node, Integers] = {}
        self._sums: dict[Node, tuple[Tensor, Tensor]] = {}  # of a convolution: exact sums, their steps by channel

    def run_node(self, n: Node) -> Any:
        """See `fx.Interpreter`."""
        if n.op == "call_function" and n.target is QUANTIZED:
            return self._rounded(n)
        if operator_name(n) in CONVOLUTIONS and self._on_integers(n):
            return self._convolution(n)
        return super().run_node(n)

    def _on_integers(self, n: Node) -> bool:
        x, weight, bias = (*n.args, None)[:3]
        return x in self._stored and _is_widened(weight) and (bias is None or _is_widened(bias))

    def _convolution(self, n: Node) -> Tensor:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        codes, scale, _ = self._stored[n.args[0]]  # type: ignore[index]
        weight, steps = self._constants(n.args[1])
        bias = self._constants(n.args[2])[0].double() if len(n.args) > 2 and n.args[2] is not None else None
        exact = n.target(codes.double(), weight.double(), bias, *args[3:], **kwargs).float()  # type: ignore[operator]
        steps = (scale * steps).view(-1, *[1] * (exact.dim() - 2))
        self._sums[n] = exact, steps
        return exact * steps

    def _rounded(self, n: Node) -> Tensor:
        (x, scale, zero_point), _ = self.fetch_args_kwargs_from_env(n)
        if zero_point.dtype == torch.float8_e4m3fn:
            found = QUANTIZED(x, scale, zero_point)
            self.codes.append((found / scale).half())
            return found
        zero, limits = int(zero_point), torch.iinfo(zero_point.dtype)
        source = n.args[0]
        assert isinstance(source, Node)
        cut = source if operator_name(source) in FUSED else None
        made_by = source if cut is None else cut.args[0]
        stored = self._result(made_by, scale, zero)  # type: ignore[arg-type]
        if stored is None:
            stored = (x / scale).round() + zero
        elif cut is not None:  # it cuts off numbers, so it may as well cut off what is rounded
            ends = cut.target(torch.tensor([-torch.inf, torch.inf]), *cut.args[1:], **cut.kwargs)  # type: ignore[operator]
            stored = stored.clamp(*((ends / scale).round() + zero).tolist())
        codes = stored.clamp(limits.min, limits.max) - zero
        self.codes.append(codes.half())
        self._stored[n] = self.codes[-1], scale, zero
        return codes * scale

    def _result(self, made_by: Node, scale: Tensor, zero: int) -> Tensor | None:
        """What a kernel that computes on integers stores, before it saturates; None: it has none for this operator."""
        if made_by in self._sums:
            exact, steps = self._sums.pop(made_by)
            return (exact * (steps / scale)).round() + zero
        plain = operator_name(made_by) == "add" and len(made_by.args) == 2 and not made_by.kwargs
        if plain and all(each in self._stored for each in made_by.args):
            (one, scale_one, zero_one), (other, scale_other, zero_other) = (self._stored[x] for x in made_by.args)  # type: ignore[index]
            first, second = scale_one / scale, scale_other / scale
            rest = zero - _fused(first, torch.tensor(float(zero_one)), second * zero_other)
            return _fused(one.float() + zero_one, first, _fused(other.float() + zero_other, second, rest)).round()
        return None

    def _constants(self, widened: Any) -> tuple[Tensor, Tensor]:
        value, steps = (tensor_at(self._network.module, str(each.target)) for each in widened.args[:2])
        return value, steps


def _is_widened(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target is WIDENED


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a · b + c in float32, rounded once."""
    return (a.double() * b.double() + c.double()).float()
