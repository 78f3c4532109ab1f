"""Linear layers in an ONNX graph: INT8 weights, and activations that are rounded token by token.

In standard operators, the rule of `kernels/quantize.py`:

    scale = max|x| / 127, 1 where that is 0        Abs, ReduceMax, Div, Equal, Where
    q = round half to even (x / scale) + 128       Div, QuantizeLinear to uint8
    y = (q · w) × scale × scale of w's row         MatMulInteger, Cast, Mul, Mul

With zero points, its `quantize_above`: y is the sum over blocks of inputs of (q · w − (zero − 128) × sum of w's row
there) × scale, times the scale of w's row.

uint8 with the zero point 128 holds the integers of int8 as they are. ONNX Runtime 1.31 on x64 multiplies int8 × int8 by
a loop 30 times as slow; uint8 × int8 saturates where there is no VNNI unless `session.x64quantprecision` is set;
uint8 × uint8 is exact everywhere. So weights are stored with the zero point 128 too, unless the target is a processor
with VNNI.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from penjing.compress.decoder.check import linear_modules
from penjing.compress.decoder_onnx.builder import GraphBuilder
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.published.table import with_floating_embedding
from penjing.core.runtime.schemes import quantized_modules
from penjing.kernels.quantize import ABOVE_INPUTS, LEVELS

ZERO = 128  # how int8 is stored in uint8


class Linears:
    """Called with a value, a module of `checkpoint` and the name of what it makes, it adds that layer to `graph`.

    Args:
        signed: whether weights are stored as int8, for processors with VNNI.
    """

    def __init__(self, checkpoint: Checkpoint, signed: bool, graph: GraphBuilder) -> None:
        self.checkpoint, self.graph, self.signed = checkpoint, graph, signed
        assert checkpoint.quantization is not None  # `check_exportable` was here before
        self.int8 = quantized_modules(checkpoint.quantization, linear_modules(checkpoint.config))
        # Value → its integers, scales and, with zero points, what these are above 128, of each block of inputs that has
        # its own: q, k and v read one input.
        self._quantized: dict[str, list[tuple[str, str, str | None]]] = {}

    def __call__(self, x: str, module: str, output: str) -> str:
        node, get = self.graph.node, partial(with_floating_embedding, self.checkpoint)
        bias = f"{module}.bias" if f"{module}.bias" in self.checkpoint.tensor_names else None
        product = output if bias is None else f"{output}/product"
        weight_KN = get(f"{module}.weight").t()
        if module in self.int8:
            blocks = self._quantize(x, len(weight_KN), self.int8[module].zero_points)
            parts = weight_KN.split(ABOVE_INPUTS if len(blocks) > 1 else len(weight_KN))
            y = self._product(module, parts[0], blocks[0], output)
            for index in range(1, len(parts)):
                term = self._product(f"{module}/{index}", parts[index], blocks[index], f"{output}/{index}")
                y = node("Add", [y, term], f"{output}/{index}/total")
            scale_N = get(f"{module}.weight_scale").to(torch.float32).flatten()
            node("Mul", [y, self.graph.constant(f"{module}.weight_scale", scale_N)], product)
        else:
            node("MatMul", [x, self.graph.constant(f"{module}.weight", weight_KN.to(torch.float32))], product)
        if bias is not None:
            node("Add", [product, self.graph.constant(bias, get(bias).to(torch.float32))], output)
        return output

    def _product(self, name: str, weight_KN: Tensor, quantized: tuple[str, str, str | None], output: str) -> str:
        """Of the integers of some inputs and their rows of the weight, times the tokens' scales."""
        node, (q, scale, above) = self.graph.node, quantized
        weight, zero = self._integers(f"{name}.weight", weight_KN)
        y = node("MatMulInteger", [q, weight, self._zero(), zero], f"{output}/int32")
        if above is not None:
            sums = self.graph.constant(f"{name}.weight/sums", weight_KN.sum(dim=0, dtype=torch.int32))
            y = node("Sub", [y, node("Mul", [above, sums], f"{output}/above")], f"{output}/sums")
        return node("Mul", [self.graph.cast(y, TensorProto.FLOAT, f"{output}/float32"), scale], f"{output}/tokens")

    def _integers(self, name: str, weight_KN: Tensor) -> tuple[str, str]:
        if self.signed:
            # ONNX Runtime makes uint8 of weight and zero point, and fails on a zero point that it changed before.
            return self.graph.constant(name, weight_KN), self.graph.constant(f"{name}/zero", np.array(0, np.int8))
        shifted = (weight_KN.to(torch.int16) + ZERO).to(torch.uint8)
        return self.graph.constant(name, shifted), self._zero()

    def _quantize(self, x: str, inputs: int, zero_points: bool) -> list[tuple[str, str, str | None]]:
        if x not in self._quantized:
            node = self.graph.node
            if zero_points:
                self._quantized[x] = [self._quantize_above(block) for block in self._blocks(x, inputs)]
                return self._quantized[x]
            size = node("Abs", [x], f"{x}/abs")
            size = node("ReduceMax", [size, self.graph.number([-1])], f"{x}/largest", keepdims=1)
            scale = node("Div", [size, self.graph.float(127.0)], f"{x}/step")
            empty = node("Equal", [scale, self.graph.float(0.0)], f"{x}/empty")
            scale = node("Where", [empty, self.graph.float(1.0), scale], f"{x}/scale")
            real = node("Div", [x, scale], f"{x}/real")
            q = node("QuantizeLinear", [real, self.graph.float(1.0), self._zero()], f"{x}/integers")
            self._quantized[x] = [(q, scale, None)]
        return self._quantized[x]

    def _blocks(self, x: str, inputs: int) -> list[str]:
        if inputs <= ABOVE_INPUTS:
            return [x]
        edges = [*range(0, inputs, ABOVE_INPUTS), inputs]
        return [
            self.graph.node("Slice", [x, *map(self.graph.number, ([begin], [end], [-1]))], f"{x}/{begin}")
            for begin, end in pairwise(edges)
        ]

    def _quantize_above(self, x: str) -> tuple[str, str, str]:
        node, last, none = self.graph.node, self.graph.number([-1]), self.graph.float(0.0)
        high = node("Max", [node("ReduceMax", [x, last], f"{x}/most", keepdims=1), none], f"{x}/high")
        low = node("Min", [node("ReduceMin", [x, last], f"{x}/least", keepdims=1), none], f"{x}/low")
        scale = node("Div", [node("Sub", [high, low], f"{x}/range"), self.graph.float(float(LEVELS))], f"{x}/step")
        empty = node("Equal", [scale, none], f"{x}/empty")
        scale = node("Where", [empty, self.graph.float(1.0), scale], f"{x}/scale")
        zero = node("Round", [node("Div", [node("Neg", [low], f"{x}/below"), scale], f"{x}/level")], f"{x}/zero")
        # Rounded before the zero point is added: a tie goes to the even number of steps from 0.
        steps = node("Round", [node("Div", [x, scale], f"{x}/real")], f"{x}/steps")
        shifted = node("Sub", [zero, self.graph.float(float(ZERO))], f"{x}/shifted")
        moved = node("Add", [steps, shifted], f"{x}/moved")
        q = node("QuantizeLinear", [moved, self.graph.float(1.0), self._zero()], f"{x}/integers")
        return q, scale, self.graph.cast(shifted, TensorProto.INT32, f"{x}/above")

    def _zero(self) -> str:
        return self.graph.constant("zero", np.array(ZERO, np.uint8))
