"""An INT8 decoder as ONNX with past and present keys and values, for ONNX Runtime; names are those of Optimum.

Inputs: "input_ids" (batch, T) and "position_ids" (batch, T), "attention_mask" (batch, past + T), all int64, and for
each layer "past_key_values.N.key" and ".value" (batch, key heads, past, head_dim) float32, past = 0 at first. Outputs:
"logits" (batch, T, vocabulary) and "present.N.key" and ".value". A batch of prompts is padded on the left.

Activations are quantized token by token in standard operators, the rule of `kernels/quantize.py`:

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
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch import Tensor

from penjing.compress.decoder.check import linear_modules
from penjing.compress.export.onnx_builder import GraphBuilder
from penjing.compress.quantize.targets import TargetName
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.rope import inverse_frequencies, yarn_magnitudes
from penjing.core.progress import Progress
from penjing.core.published.table import with_floating_embedding
from penjing.core.runtime.schemes import quantized_modules
from penjing.kernels.hadamard import hadamard
from penjing.kernels.quantize import ABOVE_INPUTS, LEVELS

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
EMBEDDED = "embedding"  # the hidden state before the first layer; `layer_output` names those after
ZERO = 128  # how int8 is stored in uint8
_MASKED = float(np.finfo(np.float32).min)  # finite: a row that sees nothing stays a number


def layer_output(layer: int) -> str:
    """The value that holds the hidden state after `layer`."""
    return f"layers.{layer}/output"


def cache_names(layers: int) -> tuple[list[str], list[str]]:
    """The graph's inputs and outputs that hold keys and values, in matching order."""
    parts = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    return [f"past_key_values.{part}" for part in parts], [f"present.{part}" for part in parts]


def write_decoder_onnx(checkpoint: Checkpoint, target: TargetName, folder: Path, progress: Progress) -> None:
    """Write `model.onnx` and `model.onnx.data` into `folder`, not yet published; one weight is in memory at a time.

    Raises:
        ConfigError: a target that cannot express quantization token by token.
        InputError: a network of another kind.
    """
    check_exportable(checkpoint, target)
    with open(folder / DATA_FILE, "wb") as data:
        writer = _Writer(checkpoint, target == "onnxruntime-cpu", GraphBuilder(data), progress)
        model = writer.write()
        size = data.tell()
    if size == 0:  # of a tiny network
        (folder / DATA_FILE).unlink()
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(folder / MODEL_FILE), full_check=True)


def check_exportable(checkpoint: Checkpoint, target: TargetName) -> None:
    """See `write_decoder_onnx`."""
    if target == "tensorrt":
        raise ConfigError(
            "TensorRT takes constant scales, a decoder's activations are quantized token by token; serve it with "
            "penjing, or give '--to compressed-tensors' to vLLM or TensorRT-LLM"
        )
    config, folder = checkpoint.config, checkpoint.folder
    unknown = {
        "experts (moe)": config.moe is not None,
        "latent attention": config.latent_attention is not None,
        "shared layers": config.shared_layers > 1,
        "LSH attention": "lsh_attention" in (config.layer_types or ()),
    }
    if found := [name for name, present in unknown.items() if present] + config.departures():
        raise InputError(f"{folder} has {' and '.join(found)}; plain decoder layers alone are written as ONNX")
    if checkpoint.quantization is None:
        raise InputError(f"{folder} is not quantized; 'penjing compress' makes an INT8 artifact of it")


class _Writer:
    def __init__(self, checkpoint: Checkpoint, signed: bool, graph: GraphBuilder, progress: Progress) -> None:
        self.checkpoint, self.config, self.graph, self.progress = checkpoint, checkpoint.config, graph, progress
        self.signed = signed  # how weights are stored
        names = linear_modules(self.config)
        assert checkpoint.quantization is not None  # `_check` was here before
        self.int8 = quantized_modules(checkpoint.quantization, names)
        # Value → its integers, scales and, with zero points, what these are above 128, of each block of inputs that has
        # its own: q, k and v read one input.
        self._quantized: dict[str, list[tuple[str, str, str | None]]] = {}
        self._masks: dict[int | None, str] = {}

    def write(self) -> Any:
        config, node = self.config, self.graph.node
        self.progress.start("writing ONNX", config.num_hidden_layers + 1)
        x = self._embed()
        self._positions()
        for layer in range(config.num_hidden_layers):
            x = self._layer(layer, x)
            self.progress.advance()
        x = self._norm(x, "model.norm", "norm")
        if config.tie_word_embeddings and "lm_head" not in self.int8:
            rows = self._cast(self._embedding(), TensorProto.FLOAT, "embedding/float32")
            node("MatMul", [x, node("Transpose", [rows], "head/weight", perm=[1, 0])], "logits")
        else:
            self._linear(x, "lm_head", "logits")
        self.progress.advance()
        return self._model()

    def _model(self) -> Any:
        config = self.config
        past, present = cache_names(config.num_hidden_layers)
        heads, size = config.num_key_value_heads, config.head_dim
        tokens: dict[str, list[Any]] = {
            "input_ids": ["batch", "sequence"],
            "attention_mask": ["batch", "total"],
            "position_ids": ["batch", "sequence"],
        }
        return self.graph.model(
            tokens | {name: ["batch", heads, "past", size] for name in past},
            {"logits": ["batch", "sequence", config.vocab_size]}
            | {name: ["batch", heads, "total", size] for name in present},
            {"penjing.kind": "decoder", "penjing.weights": "int8" if self.signed else "uint8"},
            integers=tuple(tokens),
        )

    def _embedding(self) -> str:
        weight = with_floating_embedding(self.checkpoint, "model.embed_tokens.weight")
        return self.graph.constant(
            "model.embed_tokens.weight", weight if weight.dtype == torch.float16 else weight.to(torch.float32)
        )

    def _embed(self) -> str:
        rows = self.graph.node("Gather", [self._embedding(), "input_ids"], "embedding/rows")
        return self._cast(rows, TensorProto.FLOAT, EMBEDDED)

    def _positions(self) -> None:
        """cos and sin (batch, T, 1, head_dim / 2), and the slots of keys and queries in the cache."""
        node, number = self.graph.node, self._number
        frequencies = self.graph.constant("inverse_frequency", inverse_frequencies(self.config))
        places = node(
            "Unsqueeze", [self._cast("position_ids", TensorProto.FLOAT, "positions"), number([2, 3])], "positions/4d"
        )
        angles = node("Mul", [places, frequencies], "angles")
        scale, _ = yarn_magnitudes(self.config.rope_scaling)
        for operator, name in (("Cos", "cos"), ("Sin", "sin")):
            if scale == 1.0:
                node(operator, [angles], name)
            else:
                node("Mul", [node(operator, [angles], f"{name}/plain"), self._float(scale)], name)
        past = node("Shape", ["past_key_values.0.key"], "past/shape", start=2, end=3)
        total = node("Add", [past, node("Shape", ["input_ids"], "tokens/shape", start=1, end=2)], "total/shape")
        ends = [node("Squeeze", [value], f"{value}/scalar") for value in (past, total)]
        keys = node("Range", [number(0), ends[1], number(1)], "keys")
        queries = node("Range", [ends[0], ends[1], number(1)], "queries")
        node("Unsqueeze", [queries, number([1])], "queries/column")
        causal = node("LessOrEqual", [keys, "queries/column"], "causal")
        present = node(
            "Unsqueeze", [self._cast("attention_mask", TensorProto.BOOL, "mask/bool"), number([1])], "mask/3d"
        )
        node("And", [causal, present], "visible")  # (batch, T, total)

    def _mask(self, window: int | None) -> str:
        """(batch, 1, query heads for a key head × T, total): 0 where a query sees a key."""
        if window not in self._masks:
            node, name, visible = self.graph.node, f"bias/{window}", "visible"
            if window is not None:
                first = node("Sub", ["queries/column", self._number(window)], f"{name}/first")
                visible = node("And", [visible, node("Greater", ["keys", first], f"{name}/near")], f"{name}/visible")
            one = node("Where", [visible, self._float(0.0), self._float(_MASKED)], f"{name}/3d")
            one = node("Unsqueeze", [one, self._number([1])], f"{name}/one")
            self._masks[window] = node("Concat", [one] * self._group, name, axis=2)
        return self._masks[window]

    @property
    def _group(self) -> int:
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def _layer(self, layer: int, x: str) -> str:
        node, module, name = self.graph.node, f"model.layers.{layer}", f"layers.{layer}"
        normed = self._norm(x, f"{module}.input_layernorm", f"{name}/attention_norm")
        attended = self._attention(layer, normed, f"{module}.self_attn", f"{name}/attention")
        x = node("Add", [x, attended], f"{name}/middle")
        normed = self._norm(x, f"{module}.post_attention_layernorm", f"{name}/mlp_norm")
        gate = self._linear(normed, f"{module}.mlp.gate_proj", f"{name}/gate")
        up = self._linear(normed, f"{module}.mlp.up_proj", f"{name}/up")
        silu = node("Mul", [gate, node("Sigmoid", [gate], f"{name}/sigmoid")], f"{name}/silu")
        inner = self._hadamard(node("Mul", [silu, up], f"{name}/inner"), name)
        down = self._linear(inner, f"{module}.mlp.down_proj", f"{name}/down")
        return node("Add", [x, down], layer_output(layer))

    def _hadamard(self, inner: str, name: str) -> str:
        block, number = self.config.mlp_hadamard, self._number
        if not block:
            return inner
        blocks = self.graph.node("Reshape", [inner, number([0, 0, -1, block])], f"{name}/blocks")
        matrix = self.graph.constant("hadamard", hadamard(torch.eye(block), block))
        spread = self.graph.node("MatMul", [blocks, matrix], f"{name}/hadamard")
        return self.graph.node("Reshape", [spread, number([0, 0, -1])], f"{name}/spread")

    def _attention(self, layer: int, x: str, module: str, name: str) -> str:
        node, number, config = self.graph.node, self._number, self.config
        heads, size, group = config.num_key_value_heads, config.head_dim, self._group
        q, k, v = (self._linear(x, f"{module}.{part}_proj", f"{name}/{part}") for part in "qkv")
        q, k, v = (node("Reshape", [value, number([0, 0, -1, size])], f"{value}/heads") for value in (q, k, v))
        if config.qk_norm:
            q, k = (self._norm(value, f"{module}.{part}_norm", f"{value}/norm") for part, value in (("q", q), ("k", k)))
        q, k = self._rotate(q), self._rotate(k)
        q = node("Mul", [q, self._float(size**-0.5)], f"{name}/scaled")
        # Query heads that read one key head stand below each other: no key or value is repeated.
        q = node("Reshape", [q, number([0, 0, heads, group, size])], f"{name}/groups")
        q = node("Transpose", [q], f"{name}/groups_first", perm=[0, 2, 3, 1, 4])
        q = node("Reshape", [q, number([0, 0, -1, size])], f"{name}/queries")
        cache = {}
        for part, value in (("key", k), ("value", v)):
            value = node("Transpose", [value], f"{value}/first", perm=[0, 2, 1, 3])
            past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
            cache[part] = node("Concat", [past, value], present, axis=2)
        keys = node("Transpose", [cache["key"]], f"{name}/keys", perm=[0, 1, 3, 2])
        scores = node("MatMul", [q, keys], f"{name}/scores")
        scores = node("Add", [scores, self._mask(config.layer_window(layer))], f"{name}/masked")
        weights = node("Softmax", [scores], f"{name}/weights", axis=-1)
        out = node("MatMul", [weights, cache["value"]], f"{name}/mixed")
        out = node("Reshape", [out, number([0, 0, group, -1, size])], f"{name}/split")
        out = node("Transpose", [out], f"{name}/tokens_first", perm=[0, 3, 1, 2, 4])
        out = node("Reshape", [out, number([0, 0, heads * group * size])], f"{name}/joined")
        return self._linear(out, f"{module}.o_proj", f"{name}/out")

    def _rotate(self, x: str) -> str:
        node, half = self.graph.node, self.config.head_dim // 2
        left = node("Slice", [x, *map(self._number, ([0], [half], [3]))], f"{x}/left")
        right = node("Slice", [x, *map(self._number, ([half], [2 * half], [3]))], f"{x}/right")

        def product(value: str, angle: str) -> str:
            return node("Mul", [value, angle], f"{value}/{angle}")

        first = node("Sub", [product(left, "cos"), product(right, "sin")], f"{x}/rotated_left")
        second = node("Add", [product(right, "cos"), product(left, "sin")], f"{x}/rotated_right")
        return node("Concat", [first, second], f"{x}/rotated", axis=3)

    def _norm(self, x: str, module: str, name: str) -> str:
        node = self.graph.node
        weight = self.graph.constant(f"{module}.weight", self.checkpoint.get(f"{module}.weight").to(torch.float32))
        squares = node("Pow", [x, self._float(2.0)], f"{name}/squares")
        mean = node("ReduceMean", [squares, self._number([-1])], f"{name}/mean", keepdims=1)
        root = node("Sqrt", [node("Add", [mean, self._float(self.config.rms_norm_eps)], f"{name}/sum")], f"{name}/root")
        return node("Mul", [node("Div", [x, root], f"{name}/unit"), weight], name)

    def _linear(self, x: str, module: str, output: str) -> str:
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
        return node("Mul", [self._cast(y, TensorProto.FLOAT, f"{output}/float32"), scale], f"{output}/tokens")

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
            size = node("ReduceMax", [node("Abs", [x], f"{x}/abs"), self._number([-1])], f"{x}/largest", keepdims=1)
            scale = node("Div", [size, self._float(127.0)], f"{x}/step")
            empty = node("Equal", [scale, self._float(0.0)], f"{x}/empty")
            scale = node("Where", [empty, self._float(1.0), scale], f"{x}/scale")
            real = node("Div", [x, scale], f"{x}/real")
            q = node("QuantizeLinear", [real, self._float(1.0), self._zero()], f"{x}/integers")
            self._quantized[x] = [(q, scale, None)]
        return self._quantized[x]

    def _blocks(self, x: str, inputs: int) -> list[str]:
        if inputs <= ABOVE_INPUTS:
            return [x]
        edges = [*range(0, inputs, ABOVE_INPUTS), inputs]
        return [
            self.graph.node("Slice", [x, *map(self._number, ([begin], [end], [-1]))], f"{x}/{begin}")
            for begin, end in pairwise(edges)
        ]

    def _quantize_above(self, x: str) -> tuple[str, str, str]:
        node, last, none = self.graph.node, self._number([-1]), self._float(0.0)
        high = node("Max", [node("ReduceMax", [x, last], f"{x}/most", keepdims=1), none], f"{x}/high")
        low = node("Min", [node("ReduceMin", [x, last], f"{x}/least", keepdims=1), none], f"{x}/low")
        scale = node("Div", [node("Sub", [high, low], f"{x}/range"), self._float(float(LEVELS))], f"{x}/step")
        empty = node("Equal", [scale, none], f"{x}/empty")
        scale = node("Where", [empty, self._float(1.0), scale], f"{x}/scale")
        zero = node("Round", [node("Div", [node("Neg", [low], f"{x}/below"), scale], f"{x}/level")], f"{x}/zero")
        # Rounded before the zero point is added: a tie goes to the even number of steps from 0.
        steps = node("Round", [node("Div", [x, scale], f"{x}/real")], f"{x}/steps")
        shifted = node("Sub", [zero, self._float(float(ZERO))], f"{x}/shifted")
        moved = node("Add", [steps, shifted], f"{x}/moved")
        q = node("QuantizeLinear", [moved, self._float(1.0), self._zero()], f"{x}/integers")
        return q, scale, self._cast(shifted, TensorProto.INT32, f"{x}/above")

    def _zero(self) -> str:
        return self.graph.constant("zero", np.array(ZERO, np.uint8))

    def _cast(self, x: str, kind: int, output: str) -> str:
        return self.graph.node("Cast", [x], output, to=kind)

    def _number(self, value: int | list[int]) -> str:
        name = "_".join(map(str, value)) if isinstance(value, list) else f"scalar_{value}"
        return self.graph.constant(f"int64/{name}", np.array(value, np.int64))

    def _float(self, value: float) -> str:
        return self.graph.constant(f"float32/{value!r}", np.array(value, np.float32))
