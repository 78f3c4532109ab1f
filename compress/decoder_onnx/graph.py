"""An INT8 decoder as ONNX with past and present keys and values, for ONNX Runtime; names are those of Optimum.

Inputs: "input_ids" (batch, T) and "position_ids" (batch, T), "attention_mask" (batch, past + T), all int64, and for
each layer "past_key_values.N.key" and ".value" (batch, key heads, past, head_dim) float32, past = 0 at first. Outputs:
"logits" (batch, T, vocabulary) and "present.N.key" and ".value". A batch of prompts is padded on the left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto

from penjing.compress.decoder_onnx.builder import GraphBuilder
from penjing.compress.decoder_onnx.linear import Linears
from penjing.compress.quantize.targets import TargetName
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.rope import ROTARIES, inverse_frequencies, yarn_magnitudes
from penjing.core.models.tensor_names import POSITIONS
from penjing.core.progress import Progress
from penjing.core.published.table import with_floating_embedding
from penjing.kernels.hadamard import hadamard

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
EMBEDDED = "embedding"  # the hidden state before the first layer; `layer_output` names those after
# Departures from Llama's layers that the graph has.
_WRITTEN = (
    *("norms", "inner_norms", "qk_norm_over", "qk_norm_rotated", "activation", "mlp_gated", "parallel", "head_bias"),
    *("attention_cap", "attention_sinks", "attention_gate", "logit_cap", "layer_rotary"),
    *("rotary_pairs", "rotary_local_pairs", "learned_positions", "table_hadamard"),
)
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
    departs = [each for each in config.departures() if each.partition("=")[0] not in _WRITTEN or "xielu" in each]
    if found := [name for name, present in unknown.items() if present] + departs:
        raise InputError(f"{folder} has {' and '.join(found)}, which is not written as ONNX; penjing serves it")
    if checkpoint.quantization is None:
        raise InputError(f"{folder} is not quantized; 'penjing compress' makes an INT8 artifact of it")


class _Writer:
    def __init__(self, checkpoint: Checkpoint, signed: bool, graph: GraphBuilder, progress: Progress) -> None:
        self.checkpoint, self.config, self.graph, self.progress = checkpoint, checkpoint.config, graph, progress
        self.linear = Linears(checkpoint, signed, graph)
        self._masks: dict[int | None, str] = {}

    def write(self) -> Any:
        config, node = self.config, self.graph.node
        self.progress.start("writing ONNX", config.num_hidden_layers + 1)
        x = self._embed()
        self._positions()
        for layer in range(config.num_hidden_layers):
            x = self._layer(layer, x)
            self.progress.advance()
        x = self._hadamard(self._norm(x, "model.norm", "norm"), config.table_hadamard)
        logits = "logits" if config.logit_cap is None else "logits/uncapped"
        if config.tie_word_embeddings and "lm_head" not in self.linear.int8:
            rows = self.graph.cast(self._embedding(), TensorProto.FLOAT, "embedding/float32")
            node("MatMul", [x, node("Transpose", [rows], "head/weight", perm=[1, 0])], logits)
        else:
            self.linear(x, "lm_head", logits)
        if config.logit_cap is not None:
            self._capped(logits, config.logit_cap, "logits")
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
            {"penjing.kind": "decoder", "penjing.weights": "int8" if self.linear.signed else "uint8"},
            integers=tuple(tokens),
        )

    def _embedding(self) -> str:
        weight = with_floating_embedding(self.checkpoint, "model.embed_tokens.weight")
        return self.graph.constant(
            "model.embed_tokens.weight", weight if weight.dtype == torch.float16 else weight.to(torch.float32)
        )

    def _embed(self) -> str:
        node, config = self.graph.node, self.config
        rows = node("Gather", [self._embedding(), "input_ids"], "embedding/rows")
        if not config.table_hadamard and not config.learned_positions:
            return self.graph.cast(rows, TensorProto.FLOAT, EMBEDDED)
        x = self._hadamard(self.graph.cast(rows, TensorProto.FLOAT, "embedding/float"), config.table_hadamard)
        if not config.learned_positions:
            return node("Identity", [x], EMBEDDED)
        table = self.graph.constant(POSITIONS, self.checkpoint.get(POSITIONS).to(torch.float32))
        return node("Add", [x, node("Gather", [table, "position_ids"], "embedding/positions")], EMBEDDED)

    def _positions(self) -> None:
        """cos and sin (batch, T, 1, head_dim / 2) of each way of rotating, and the slots of keys and queries in the
        cache."""
        node, number, config = self.graph.node, self.graph.number, self.config
        places = self.graph.cast("position_ids", TensorProto.FLOAT, "positions")
        places = node("Unsqueeze", [places, number([2, 3])], "positions/4d")
        frequencies = inverse_frequencies(config)
        for kind in sorted(set(config.layer_rotary or ("main",)) - {"none"}):
            own = frequencies if config.layer_rotary is None else frequencies[ROTARIES.index(kind)]
            angles = node("Mul", [places, self.graph.constant(f"{kind}/inverse_frequency", own)], f"{kind}/angles")
            scale = yarn_magnitudes(config.rope_scaling)[0] if kind == "main" else 1.0
            for operator, name in (("Cos", "cos"), ("Sin", "sin")):
                plain = node(operator, [angles], f"{kind}/{name}" if scale == 1.0 else f"{kind}/{name}/plain")
                if scale != 1.0:
                    node("Mul", [plain, self.graph.float(scale)], f"{kind}/{name}")
        past = node("Shape", ["past_key_values.0.key"], "past/shape", start=2, end=3)
        total = node("Add", [past, node("Shape", ["input_ids"], "tokens/shape", start=1, end=2)], "total/shape")
        ends = [node("Squeeze", [value], f"{value}/scalar") for value in (past, total)]
        keys = node("Range", [number(0), ends[1], number(1)], "keys")
        queries = node("Range", [ends[0], ends[1], number(1)], "queries")
        node("Unsqueeze", [queries, number([1])], "queries/column")
        causal = node("LessOrEqual", [keys, "queries/column"], "causal")
        present = node(
            "Unsqueeze", [self.graph.cast("attention_mask", TensorProto.BOOL, "mask/bool"), number([1])], "mask/3d"
        )
        node("And", [causal, present], "visible")  # (batch, T, total)

    def _mask(self, window: int | None) -> str:
        """(batch, 1, query heads for a key head × T, total): 0 where a query sees a key."""
        if window not in self._masks:
            node, name, visible = self.graph.node, f"bias/{window}", "visible"
            if window is not None:
                first = node("Sub", ["queries/column", self.graph.number(window)], f"{name}/first")
                visible = node("And", [visible, node("Greater", ["keys", first], f"{name}/near")], f"{name}/visible")
            one = node("Where", [visible, self.graph.float(0.0), self.graph.float(_MASKED)], f"{name}/3d")
            one = node("Unsqueeze", [one, self.graph.number([1])], f"{name}/one")
            self._masks[window] = node("Concat", [one] * self._group, name, axis=2)
        return self._masks[window]

    @property
    def _group(self) -> int:
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def _layer(self, layer: int, x: str) -> str:
        """Norms before, around or behind attention and MLP, one behind the other or beside each other; see
        `core/models/decoder.py`."""
        node, module, name, norms = self.graph.node, f"model.layers.{layer}", f"layers.{layer}", self.config.norms

        def half(x: str, part: str, before: str, after: str) -> str:
            read = x if norms == "after" else self._norm(x, f"{module}.{before}", f"{name}/{part}_norm")
            if part == "attention":
                made = self._attention(layer, read, f"{module}.self_attn", f"{name}/attention")
            else:
                made = self._mlp(read, f"{module}.mlp", name)
            return made if norms == "before" else self._norm(made, f"{module}.{after}", f"{name}/{part}_after")

        attended = half(x, "attention", "input_layernorm", "attention_output_norm")
        middle = node("Add", [x, attended], f"{name}/middle")
        made = half(x if self.config.parallel else middle, "mlp", "post_attention_layernorm", "mlp_output_norm")
        return node("Add", [middle, made], layer_output(layer))

    def _mlp(self, x: str, module: str, name: str) -> str:
        config = self.config
        inner = self._activated(self.linear(x, f"{module}.gate_proj", f"{name}/gate"), name)
        if config.mlp_gated:
            up = self.linear(x, f"{module}.up_proj", f"{name}/up")
            inner = self.graph.node("Mul", [inner, up], f"{name}/inner")
        if config.inner_norms:
            inner = self._norm(inner, f"{module}.ffn_sub_norm", f"{name}/inner_norm")
        return self.linear(self._hadamard(inner, config.mlp_hadamard), f"{module}.down_proj", f"{name}/down")

    def _activated(self, gate: str, name: str) -> str:
        node, kind = self.graph.node, self.config.activation
        if kind == "silu":
            return node("Mul", [gate, node("Sigmoid", [gate], f"{name}/sigmoid")], f"{name}/silu")
        if kind in ("gelu", "gelu_tanh"):
            return node("Gelu", [gate], f"{name}/{kind}", approximate="tanh" if kind == "gelu_tanh" else "none")
        positive = node("Relu", [gate], f"{name}/relu")
        return positive if kind == "relu" else node("Mul", [positive, positive], f"{name}/relu2")

    def _hadamard(self, x: str, block: int) -> str:
        number = self.graph.number
        if not block:
            return x
        blocks = self.graph.node("Reshape", [x, number([0, 0, -1, block])], f"{x}/blocks")
        matrix = self.graph.constant(f"hadamard/{block}", hadamard(torch.eye(block), block))
        spread = self.graph.node("MatMul", [blocks, matrix], f"{x}/hadamard")
        return self.graph.node("Reshape", [spread, number([0, 0, -1])], f"{x}/spread")

    def _attention(self, layer: int, x: str, module: str, name: str) -> str:
        node, number, config = self.graph.node, self.graph.number, self.config
        heads, size, group = config.num_key_value_heads, config.head_dim, self._group
        q, k, v = (self.linear(x, f"{module}.{part}_proj", f"{name}/{part}") for part in "qkv")
        q, k = self._heads(layer, q, f"{module}.q_norm"), self._heads(layer, k, f"{module}.k_norm")
        v = node("Reshape", [v, number([0, 0, -1, size])], f"{v}/heads")
        q = node("Mul", [q, self.graph.float(size**-0.5)], f"{name}/scaled")
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
        if config.attention_cap is not None:
            scores = self._capped(scores, config.attention_cap, f"{name}/capped")
        scores = node("Add", [scores, self._mask(config.layer_window(layer))], f"{name}/masked")
        weights = self._weights(scores, module, name)
        out = node("MatMul", [weights, cache["value"]], f"{name}/mixed")
        out = node("Reshape", [out, number([0, 0, group, -1, size])], f"{name}/split")
        out = node("Transpose", [out], f"{name}/tokens_first", perm=[0, 3, 1, 2, 4])
        out = node("Reshape", [out, number([0, 0, heads * group * size])], f"{name}/joined")
        if config.attention_gate is not None:
            out = self._gated(out, x, module, name)
        if config.inner_norms:
            out = self._norm(out, f"{module}.attn_sub_norm", f"{name}/joined_norm")
        return self.linear(out, f"{module}.o_proj", f"{name}/out")

    def _gated(self, out: str, x: str, module: str, name: str) -> str:
        """`out` times what the gate makes of `x`, a number a channel or a head."""
        node, number, config = self.graph.node, self.graph.number, self.config
        function = "Sigmoid" if config.attention_gate_function == "sigmoid" else "Softplus"
        gate = node(function, [self.linear(x, f"{module}.g_proj", f"{name}/gate")], f"{name}/gate/open")
        if config.attention_gate == "channel":
            return node("Mul", [out, gate], f"{name}/gated")
        heads = node("Reshape", [out, number([0, 0, -1, config.head_dim])], f"{name}/gate/heads")
        gate = node("Unsqueeze", [gate, number([3])], f"{name}/gate/each")
        return node("Reshape", [node("Mul", [heads, gate], f"{name}/gated/heads"), number([0, 0, -1])], f"{name}/gated")

    def _heads(self, layer: int, x: str, norm: str) -> str:
        """Queries or keys as heads, (batch, T, heads, head_dim), normed and rotated in the order of the network."""
        node, config = self.graph.node, self.config
        whole = config.qk_norm and config.qk_norm_over == "all"
        if whole:
            x = self._norm(x, norm, f"{x}/norm")
        x = node("Reshape", [x, self.graph.number([0, 0, -1, config.head_dim])], f"{x}/heads")
        if config.qk_norm and not whole and not config.qk_norm_rotated:
            x = self._norm(x, norm, f"{x}/norm")
        kind = "main" if config.layer_rotary is None else config.layer_rotary[layer]
        if kind != "none":
            x = self._rotate(x, kind)
        return self._norm(x, norm, f"{x}/norm") if config.qk_norm_rotated else x

    def _weights(self, scores: str, module: str, name: str) -> str:
        """The softmax of `scores`, (batch, key heads, group × T, total), with a sink of each head in its sum if there
        are such."""
        node, number, heads, group = self.graph.node, self.graph.number, self.config.num_key_value_heads, self._group
        if not self.config.attention_sinks:
            return node("Softmax", [scores], f"{name}/weights", axis=-1)
        sinks = self.checkpoint.get(f"{module}.sinks").to(torch.float32).view(1, heads, group, 1)
        first = node("Slice", [scores, *map(number, ([0], [1], [3]))], f"{name}/first")
        none = node("Mul", [first, self.graph.float(0.0)], f"{name}/none")
        none = node("Reshape", [none, number([0, 0, group, -1])], f"{name}/none_of_heads")
        column = node("Add", [none, self.graph.constant(f"{module}.sinks", sinks)], f"{name}/sinks")
        column = node("Reshape", [column, number([0, 0, -1, 1])], f"{name}/sinks_column")
        scores = node("Concat", [scores, column], f"{name}/with_sinks", axis=-1)
        whole = node("Softmax", [scores], f"{name}/weights_and_sinks", axis=-1)
        return node("Slice", [whole, *map(number, ([0], [-1], [3]))], f"{name}/weights")

    def _capped(self, x: str, cap: float, name: str) -> str:
        node, size = self.graph.node, self.graph.float(cap)
        bent = node("Tanh", [node("Div", [x, size], f"{name}/share")], f"{name}/tanh")
        return node("Mul", [bent, size], name)

    def _rotate(self, x: str, kind: str) -> str:
        node, number, half = self.graph.node, self.graph.number, self.config.head_dim // 2
        left = node("Slice", [x, *map(number, ([0], [half], [3]))], f"{x}/left")
        right = node("Slice", [x, *map(number, ([half], [2 * half], [3]))], f"{x}/right")

        def product(value: str, angle: str) -> str:
            return node("Mul", [value, f"{kind}/{angle}"], f"{value}/{angle}")

        first = node("Sub", [product(left, "cos"), product(right, "sin")], f"{x}/rotated_left")
        second = node("Add", [product(right, "cos"), product(left, "sin")], f"{x}/rotated_right")
        return node("Concat", [first, second], f"{x}/rotated", axis=3)

    def _norm(self, x: str, module: str, name: str) -> str:
        node = self.graph.node
        weight = self.graph.constant(f"{module}.weight", self.checkpoint.get(f"{module}.weight").to(torch.float32))
        squares = node("Pow", [x, self.graph.float(2.0)], f"{name}/squares")
        mean = node("ReduceMean", [squares, self.graph.number([-1])], f"{name}/mean", keepdims=1)
        summed = node("Add", [mean, self.graph.float(self.config.rms_norm_eps)], f"{name}/sum")
        root = node("Sqrt", [summed], f"{name}/root")
        return node("Mul", [node("Div", [x, root], f"{name}/unit"), weight], name)
