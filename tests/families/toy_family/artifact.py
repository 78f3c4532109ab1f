"""A toy with INT8 weights: written as ONNX, opened, and run, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx import OnnxArtifact, Quantization, open_onnx_artifact
from penjing.core.artifact.onnx_classifier import logit_difference
from penjing.core.artifact.parity import FAKE_QUANTIZED, Difference, Parity
from penjing.core.runtime.onnx_runtime import open_graph

POINTS, SCORES = "points", "scores"
OPSET = 17


@dataclass(frozen=True)
class Layer:
    """A linear layer: weight (N, K) int8, scale (N,) and bias (N,) float32."""

    weight: NDArray[np.int8]
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]


@dataclass(frozen=True)
class ToyArtifact(OnnxArtifact):
    """A verified artifact."""

    def session(self) -> Any:
        """ONNX Runtime, as the artifact asks for it."""
        return open_file(self.folder / MODEL_FILE, self.quantization.session_options)

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of a point, and classes."""
        rows = np.array(self.parity.outputs[FAKE_QUANTIZED])
        return recorded_points(self.parity).shape[1], rows.shape[1]


def open_artifact(folder: Path) -> ToyArtifact:
    """Open an artifact and check every hash."""
    return ToyArtifact(**vars(open_onnx_artifact(folder, "toy")))


def recorded_points(parity: Parity) -> NDArray[np.float32]:
    """The inputs of a parity record."""
    return np.array(parity.inputs[POINTS], np.float32)


def open_file(file: Path, options: dict[str, str], *, optimise: bool = True) -> Any:
    """A session of ONNX Runtime on one thread."""
    return open_graph(file, options, threads=1, optimise=optimise, names=([POINTS], [SCORES]))


def scores(session: Any, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """(B, inputs) → (B, classes)."""
    return session.run([SCORES], {POINTS: x})[0]


def ways(file: Path, quantization: Quantization, x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """What ONNX Runtime answers in each way that it may run `file`."""
    return {
        name: scores(open_file(file, options, optimise=optimise), x)
        for name, (options, optimise) in quantization.ways().items()
    }


def differences_of(known: NDArray[Any], found: dict[str, NDArray[np.float32]]) -> tuple[Difference, ...]:
    """Of each way from the fake-quantized network."""
    return tuple(logit_difference((FAKE_QUANTIZED, name), known, rows) for name, rows in found.items())


def write_onnx(layers: Sequence[Layer], path: Path) -> None:
    """Each weight passes a DequantizeLinear, row by row."""
    nodes, stored, x = [], [], POINTS
    for index, layer in enumerate(layers):
        names = {part: f"{part}_{index}" for part in ("weight", "scale", "zero", "bias", "float", "sum", "relu")}
        values = {"weight": layer.weight, "scale": layer.scale, "bias": layer.bias}
        values["zero"] = np.zeros(len(layer.weight), np.int8)
        stored += [numpy_helper.from_array(value, names[part]) for part, value in values.items()]
        pair = [names["weight"], names["scale"], names["zero"]]
        last = index == len(layers) - 1
        y = SCORES if last else names["sum"]
        nodes.append(helper.make_node("DequantizeLinear", pair, [names["float"]], axis=0))
        nodes.append(helper.make_node("Gemm", [x, names["float"], names["bias"]], [y], transB=1))
        if not last:
            nodes.append(helper.make_node("Relu", [y], [names["relu"]]))
        x = names["relu"]
    sizes = layers[0].weight.shape[1], layers[-1].weight.shape[0]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in zip((POINTS, SCORES), sizes, strict=True)
    ]
    graph = helper.make_graph(nodes, "toy", ends[:1], ends[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8), path)
