"""A text encoder as ONNX with explicit Q/DQ: token ids and mask → embeddings, batch and sequence dynamic.

Written node by node, as classifiers are (`export/onnx.py`). Linear layers are products of matrices (tokens, features),
which ONNX Runtime computes on integers; pooling and scaling to length 1 are part of the graph. Inside, positions come
first: (sequence, batch, heads, size). Then ONNX Runtime takes the transpositions of queries, keys and values into the
products (FusedMatMul reads them with strides), and one of four remains.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from penjing.compress.export.graph import GraphBuilder
from penjing.compress.quantize.modules import QuantizedLinear
from penjing.compress.quantize.place_bert import ATTENTION, QuantizedEmbedding
from penjing.compress.quantize.targets import TargetName
from penjing.compress.rounding.fake_quantize import ActivationQuantizer
from penjing.core.artifact.onnx_encoder import IDS, MASK, OUTPUT
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_bytes
from penjing.core.models.encoder import Encoder, EncoderLayer


def export_encoder(model: Encoder, target: TargetName, path: Path) -> int:
    """Write `model`, in evaluation mode, to `path`; floating where `apply_quantization` was not done.

    The graph takes "input_ids" and "attention_mask" (batch, sequence) int64 and gives "embedding" (batch, hidden)
    float32 of length 1.

    Returns:
        Bytes written.

    Raises:
        InputError: a quantizer was never calibrated.
    """
    for module in model.modules():
        if isinstance(module, ActivationQuantizer) and not bool(module.ready):
            raise InputError(f"the range of {module.name} is unknown; calibrate the model before it is exported")
    shape = ["batch", "sequence"]
    proto = _Writer(model).graph.model(
        {IDS: shape, MASK: shape},
        {OUTPUT: ["batch", model.config.hidden_size]},
        {"penjing.target": target},
        integers=(IDS, MASK),
    )
    data = proto.SerializeToString()
    atomic_write_bytes(path, data)
    return len(data)


class _Writer:
    def __init__(self, model: Encoder) -> None:
        self.graph, self.model = GraphBuilder(), model
        self._quantized: dict[tuple[str, str], str] = {}  # (value, quantizer) → what comes out of its DQ
        node, config = self.graph.node, model.config
        size, heads = config.hidden_size, config.num_attention_heads
        node("Transpose", [IDS], "ids", perm=[1, 0])
        node("Shape", ["ids"], "shape")
        self.heads = self._ints("heads", [heads, size // heads])
        self.split = node("Concat", ["shape", self.heads], "shape/heads", axis=0)
        self.rows, self.last = self._ints("rows", [-1, size]), self._ints("last", [-1])
        self.whole = node("Concat", ["shape", self._ints("size", [size])], "shape/hidden", axis=0)
        mask = node("Cast", [MASK], "mask", to=TensorProto.FLOAT)
        away = node("Sub", [self._float("one", 1.0), mask], "padding")
        lowest = node("Mul", [away, self._float("lowest", float(np.finfo(np.float32).min))], "padding/scores")
        self.bias = node("Unsqueeze", [lowest, self._ints("axes/1,2", [1, 2])], "padding/bias")
        x = self._embeddings()
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, EncoderLayer)
            x = self._layer(f"layers.{index}", layer, x)
        self._pool(x, mask)

    def _embeddings(self) -> str:
        node, model = self.graph.node, self.model
        if isinstance(model.words, QuantizedEmbedding):
            integers, scale = model.words.integers()
            stored = node("Gather", [self.graph.constant("words", integers), "ids"], "words/integers")
            wide = node("Cast", [stored], "words/wide", to=TensorProto.FLOAT)
            step = node("Gather", [self.graph.constant("words/scale", scale.view(-1, 1)), "ids"], "words/step")
            words = node("Mul", [wide, step], "words/rows")
        else:
            words = node("Gather", [self.graph.constant("words", model.words.weight), "ids"], "words/rows")
        table = self.graph.constant("positions", model.positions.weight)
        length = node("Slice", ["shape", self._ints("zero", [0]), self._ints("axis/1", [1])], "length")
        place = node("Slice", [table, self._ints("zero", [0]), length], "positions/first")
        place = node("Unsqueeze", [place, self._ints("axis/1", [1])], "positions/rows")
        x = node("Add", [node("Add", [words, place], "words/placed"), self._type_row()], "embeddings")
        return self._norm("norm", model.norm, node("Reshape", [x, self.rows], "embeddings/rows"))

    def _type_row(self) -> str:
        return self.graph.constant("types.0", self.model.types.weight[0])

    def _layer(self, name: str, layer: EncoderLayer, x: str) -> str:
        node = self.graph.node
        q, k, v = (self._heads(f"{name}.{part}", getattr(layer, part), x) for part in ATTENTION)
        head_size = self.model.config.hidden_size // layer.num_heads
        scaled = node("Mul", [q, self._float("head_scale", head_size**-0.5)], f"{name}.query/scaled")
        scores = node("Add", [node("MatMul", [scaled, k], f"{name}.products"), self.bias], f"{name}.scores")
        mixed = node("MatMul", [node("Softmax", [scores], f"{name}.weights", axis=-1), v], f"{name}.mixed")
        together = node("Transpose", [mixed], f"{name}.mixed/tokens", perm=[2, 0, 1, 3])
        flat = node("Reshape", [together, self.rows], f"{name}.mixed/rows")
        y = self._added(f"{name}.output", layer.output, flat, x)
        y = self._norm(f"{name}.attention_norm", layer.attention_norm, y)
        up = node("Gelu", [self._up(f"{name}.up", layer.up, y)], f"{name}.gelu")
        up = node("Reshape", [up, self._ints("inner", [-1, layer.up.weight.shape[0]])], f"{name}.gelu/rows")
        return self._norm(f"{name}.norm", layer.norm, self._added(f"{name}.down", layer.down, up, y))

    def _up(self, name: str, layer: nn.Module, x: str) -> str:
        y, bias = self._linear(name, layer, x)
        if not bias:
            return y
        # A bias (inner,) would be fused: with MatMul to a floating Gemm, or with Gelu to BiasGelu, twice as slow.
        apart = self.graph.node("Reshape", [bias, self._ints("apart", [1, 1, -1])], f"{bias}/apart")
        return self.graph.node("Add", [y, apart], f"{name}/biased")

    def _added(self, name: str, layer: nn.Module, x: str, residual: str) -> str:
        y, bias = self._linear(name, layer, x)
        y = self.graph.node("Add", [residual, y], f"{name}/sum")
        return self.graph.node("Add", [y, bias], f"{name}/biased") if bias else y

    def _heads(self, name: str, layer: nn.Module, x: str) -> str:
        y, bias = self._linear(name, layer, x)
        parted = self.graph.node("Reshape", [y, self.split], f"{name}/parted")
        if bias:
            heads = self.graph.node("Reshape", [bias, self.heads], f"{bias}/parted")
            parted = self.graph.node("Add", [parted, heads], f"{name}/biased")
        order = [1, 2, 3, 0] if name.endswith(".key") else [1, 2, 0, 3]  # keys transposed, for the product
        return self.graph.node("Transpose", [parted], f"{name}/heads", perm=order)

    def _linear(self, name: str, layer: nn.Module, x: str) -> tuple[str, str]:
        """(rows, outputs), and the name of the bias that is still to be added, or "".

        Integer products are a MatMul: ONNX Runtime's QGemm copies a bias to every row first, on one core.
        """
        if not isinstance(layer, QuantizedLinear):
            assert isinstance(layer, nn.Linear)
            weight, bias = (self.graph.constant(f"{name}.{part}", getattr(layer, part)) for part in ("weight", "bias"))
            return self.graph.node("Gemm", [x, weight, bias], name, transB=1), ""
        assert layer.input_quantizer is not None
        x = self._quantize(x, layer.input_quantizer, getattr(layer, "factor", None))
        folded = layer.fold(None)
        y = self.graph.node("MatMul", [x, self.graph.weight(name, folded, axis=1)], name)
        return y, self.graph.constant(f"{name}.bias", folded.bias) if folded.bias.any() else ""

    def _quantize(self, x: str, quantizer: ActivationQuantizer, factor: Tensor | None) -> str:
        key = (x, quantizer.name)
        if key not in self._quantized:
            if factor is not None:
                x = self.graph.node("Mul", [x, self.graph.constant(f"{quantizer.name}/factor", factor)], f"{x}/smooth")
            self._quantized[key] = self.graph.quantize(x, quantizer, quantizer.name)
        return self._quantized[key]

    def _norm(self, name: str, norm: nn.LayerNorm, x: str) -> str:
        weight, bias = (self.graph.constant(f"{name}.{part}", getattr(norm, part)) for part in ("weight", "bias"))
        return self.graph.node("LayerNormalization", [x, weight, bias], name, axis=-1, epsilon=norm.eps)

    def _pool(self, x: str, mask: str) -> None:
        node, axis = self.graph.node, self._ints("axis/1", [1])
        column = node("Unsqueeze", [node("Transpose", [mask], "mask/first", perm=[1, 0]), self.last], "mask/column")
        kept = node("Mul", [node("Reshape", [x, self.whole], "hidden"), column], "hidden/kept")
        total = node("ReduceSum", [kept, self._ints("zero", [0])], "pool/total", keepdims=0)
        number = node("ReduceSum", [mask, axis], "pool/number", keepdims=1)
        mean = node("Div", [total, node("Max", [number, self._float("least", 1e-9)], "pool/least")], "pool/mean")
        length = node("ReduceL2", [mean, axis], "pool/length", keepdims=1)
        node("Div", [mean, node("Max", [length, self._float("least/length", 1e-12)], "pool/safe")], OUTPUT)

    def _ints(self, name: str, values: list[int]) -> str:
        return self.graph.constant(f"const/{name}", np.array(values, np.int64))

    def _float(self, name: str, value: float) -> str:
        return self.graph.constant(f"const/{name}", torch.tensor(value, dtype=torch.float32))
