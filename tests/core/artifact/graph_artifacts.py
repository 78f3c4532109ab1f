"""Artifacts of small graphs in floating point, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

from penjing.core.artifact.base import MODEL_FILE, QUANTIZATION_FILE
from penjing.core.artifact.onnx import ONNX_RUNTIME, Quantization
from penjing.core.artifact.onnx_graph import (
    QUANTITY,
    Tensors,
    graph_differences,
    open_graph_session,
    run_graph,
    tensors_to_record,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Parity, write_parity
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.graph.config import GraphConfig, Pixels, TensorSpec
from penjing.core.manifest import write_manifest
from penjing.core.text.text_tokenizer import TOKENIZER

OPSET = 17
LABELS = ("ash", "oak", "elm")
_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}


def two_inputs(folder: Path) -> Path:
    """`x` float32 (batch, 4) and `choice` int64 (batch,) give `scores` (batch, 3) and `sure` bool (batch, 3)."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "choice"], ["row"]),
        helper.make_node("Add", ["x", "row"], ["sum"]),
        helper.make_node("MatMul", ["sum", "weight"], ["scores"]),
        helper.make_node("Greater", ["scores", "zero"], ["sure"]),
    ]
    stored = {
        "table": rng.standard_normal((5, 4), np.float32),
        "weight": rng.standard_normal((4, 3), np.float32),
        "zero": np.float32(0),
    }
    config = GraphConfig(
        inputs=(
            TensorSpec(name="x", dtype="float32", shape=("batch", 4)),
            TensorSpec(name="choice", dtype="int64", shape=("batch",)),
        ),
        outputs=(
            TensorSpec(name="scores", dtype="float32", shape=("batch", 3)),
            TensorSpec(name="sure", dtype="bool", shape=("batch", 3)),
        ),
        meaning="classes",
        labels=LABELS,
    )
    example = {"x": rng.standard_normal((8, 4), np.float32), "choice": np.arange(8) % 5}
    return write_artifact(folder, config, nodes, stored, example)


def image_network(folder: Path, batch: int | str = "batch") -> Path:
    """`input` float32 (batch, 3, 8, 6), normalised images, gives `logits` (batch, 3); `batch` may be a number."""
    rng = np.random.default_rng(1)
    nodes = [
        helper.make_node("Conv", ["input", "kernel"], ["hidden"]),
        helper.make_node("GlobalAveragePool", ["hidden"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["logits"]),
    ]
    config = GraphConfig(
        inputs=(TensorSpec(name="input", dtype="float32", shape=(batch, 3, 8, 6)),),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=(batch, 3)),),
        meaning="classes",
        labels=LABELS,
        pixels=Pixels(height=8, width=6, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3)),
    )
    rows = batch if isinstance(batch, int) else 4
    example = {"input": rng.standard_normal((rows, 3, 8, 6), np.float32)}
    return write_artifact(folder, config, nodes, {"kernel": rng.standard_normal((3, 3, 3, 3), np.float32)}, example)


WORDS = ("[PAD]", "small", "trees", "grow", "slowly", "in", "pots")


def token_network(folder: Path) -> Path:
    """`input_ids` and `attention_mask` int64 (batch, length) give `words` (batch, length, 4) and `sum` (batch, 4);
    words of `WORDS` are tokens."""
    rng = np.random.default_rng(2)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["floating"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["floating", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["words"]),
        helper.make_node("ReduceSum", ["words", "axes"], ["sum"], keepdims=0),
    ]
    shape = ("batch", "length")
    config = GraphConfig(
        inputs=tuple(TensorSpec(name=name, dtype="int64", shape=shape) for name in ("input_ids", "attention_mask")),
        outputs=(
            TensorSpec(name="words", dtype="float32", shape=(*shape, 4)),
            TensorSpec(name="sum", dtype="float32", shape=("batch", 4)),
        ),
    )
    stored = {
        "table": rng.standard_normal((len(WORDS), 4), np.float32), "last": np.array([2]), "axes": np.array([1])
    }  # fmt: skip
    example = {"input_ids": rng.integers(0, len(WORDS), (4, 5)), "attention_mask": np.ones((4, 5), np.int64)}
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return write_artifact(folder, config, nodes, stored, example, made.to_str())


def lengths_apart(folder: Path) -> Path:
    """`sequence` float16 (length, 2), without a batch, gives `total` (2,) and `turned` (2, length)."""
    nodes = [
        helper.make_node("ReduceSum", ["sequence", "axes"], ["total"], keepdims=0),
        helper.make_node("Transpose", ["sequence"], ["turned"], perm=[1, 0]),
    ]
    config = GraphConfig(
        inputs=(TensorSpec(name="sequence", dtype="float16", shape=("length", 2)),),
        outputs=(
            TensorSpec(name="total", dtype="float16", shape=(2,)),
            TensorSpec(name="turned", dtype="float16", shape=(2, "length")),
        ),
    )
    example = {"sequence": np.arange(10, dtype=np.float16).reshape(5, 2)}
    return write_artifact(folder, config, nodes, {"axes": np.array([0])}, example)


def write_artifact(
    folder: Path,
    config: GraphConfig,
    nodes: Sequence[NodeProto],
    stored: dict[str, Any],
    example: Tensors,
    tokenizer: str = "",
) -> Path:
    """A published folder; its record holds `example` and what ONNX Runtime answers to it."""
    inputs, outputs = (
        [helper.make_tensor_value_info(spec.name, _TYPES[spec.dtype], spec.shape) for spec in specs]
        for specs in (config.inputs, config.outputs)
    )
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(list(nodes), "graph", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model)
    quantization = Quantization(
        target="onnxruntime-cpu", activations="float32", weights="float32", opset=OPSET, session_options={}
    )
    bound = Bound(between=(FAKE_QUANTIZED, ONNX_RUNTIME), quantity=QUANTITY, statistic="mean", value=0.01)
    with publish_folder(folder) as partial:
        onnx.save(model, partial / MODEL_FILE)
        answers = run_graph(open_graph_session(partial / MODEL_FILE, config, threads=1), config, example)
        differences = graph_differences(bound.between, answers, answers, config)
        atomic_write_text(partial / "config.json", config.model_dump_json())
        atomic_write_text(partial / QUANTIZATION_FILE, quantization.model_dump_json())
        outputs = dict.fromkeys(bound.between, tensors_to_record(answers))
        record = tensors_to_record(example)
        write_parity(
            partial, Parity(family="graph", inputs=record, outputs=outputs, differences=differences, bound=bound)
        )
        if tokenizer:
            atomic_write_text(partial / TOKENIZER, tokenizer)
        write_manifest(partial, "artifact", {"command": "test"})
    return folder
