"""Artifact folders of quantized graphs; see `onnx.py`.

config.json is a `GraphConfig`; inputs and outputs of model.onnx have its names, types and axes. The parity record holds
tensors of any number, name and type, each as {"dtype", "shape", "data": base64 of its bytes}.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.base import MODEL_FILE, PARITY_FILE
from penjing.core.artifact.onnx import OnnxArtifact, open_onnx_artifact
from penjing.core.artifact.parity import Difference, Parity, measured
from penjing.core.errors import InputError
from penjing.core.graph.config import GraphConfig, graph_config
from penjing.core.runtime.onnx_runtime import open_graph

QUANTITY = "outputs"
"""All outputs together: the largest distances and the largest mean of any; what a bound is about."""
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class GraphArtifact(OnnxArtifact):
    """A verified artifact folder."""

    config: GraphConfig

    def session(self, threads: int = 0) -> Any:
        """An ONNX Runtime session with the options that the artifact asks for."""
        quantization = self.quantization
        return open_graph_session(
            self.folder / MODEL_FILE,
            self.config,
            quantization.session_options,
            threads=threads,
            optimise=quantization.optimise,
        )


def open_graph_artifact(folder: Path) -> GraphArtifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    return GraphArtifact(**vars(open_onnx_artifact(folder, "graph")), config=graph_config(folder))


def open_graph_session(
    path: Path, config: GraphConfig, entries: dict[str, str] | None = None, *, threads: int = 0, optimise: bool = True
) -> Any:
    """A session of a graph's file; see `open_graph`.

    Raises:
        InputError: as there, or a tensor of a type that numpy does not have.
    """
    for spec in (*config.inputs, *config.outputs):
        if spec.dtype == "bfloat16":
            raise InputError(
                f"{spec} cannot be given to ONNX Runtime from Python, which has no bfloat16; import the network with "
                "--dtype float32"
            )
    names = [spec.name for spec in config.inputs], [spec.name for spec in config.outputs]
    return open_graph(path, entries, threads=threads, optimise=optimise, names=names)


def run_graph(session: Any, config: GraphConfig, inputs: Tensors) -> dict[str, NDArray[Any]]:
    """The outputs of `config`, by name."""
    names = [spec.name for spec in config.outputs]
    found = session.run(names, {spec.name: inputs[spec.name] for spec in config.inputs})
    return dict(zip(names, found, strict=True))


def tensors_to_record(tensors: Tensors) -> dict[str, Any]:
    """Tensors by name, as a parity record holds them among its inputs, or as the answer of an implementation."""
    return {
        name: {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
        }
        for name, value in tensors.items()
    }


def recorded_inputs(parity: Parity, config: GraphConfig) -> dict[str, NDArray[Any]]:
    """The inputs of a parity record, by name.

    Raises:
        InputError: the record is damaged, or of another network.
    """
    return _recorded(parity.inputs, [spec.name for spec in config.inputs], "inputs")


def recorded_outputs(parity: Parity, config: GraphConfig, name: str) -> dict[str, NDArray[Any]]:
    """What the implementation `name` answered, by output.

    Raises:
        InputError: the record is damaged, of another network, or does not know `name`.
    """
    return _recorded(parity.outputs.get(name), [spec.name for spec in config.outputs], f"answers of {name}")


def _recorded(stored: Any, names: list[str], what: str) -> dict[str, NDArray[Any]]:
    try:
        return {name: _tensor(stored[name]) for name in names}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{PARITY_FILE}: the {what} are damaged ({error!r}); compress the model again") from None


def _tensor(stored: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(stored["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"tensors of {dtype} are not recorded")
    return np.frombuffer(base64.b64decode(stored["data"], validate=True), dtype).reshape(stored["shape"])


def graph_differences(
    between: tuple[str, str], first: Tensors, second: Tensors, config: GraphConfig
) -> tuple[Difference, ...]:
    """Compare the outputs of two implementations.

    Returns:
        First of all outputs together (`QUANTITY`); its `same` is the share of rows that both put into the same class,
        where the first output has classes. Then of each output, under "output NAME", absolute differences divided by
        the standard deviation of the first one's values (from row to row where axis 0 is the batch); of integers and
        flags, how often they are unequal. And of each floating output, under "cosine distance of NAME", 1 - cosine, row
        by row.

    Raises:
        InputError: other shapes, or NaN or infinity where the other has something else.
    """
    found: list[Difference] = []
    for spec in config.outputs:
        one, other = first[spec.name], second[spec.name]
        if one.shape != other.shape:
            raise InputError(f"{spec.name} has the shape {one.shape} in {between[0]}, {other.shape} in {between[1]}")
        found += _of_output(between, spec.name, one, other, config.batched)
    outputs = [each for each in found if each.quantity.startswith("output ")]
    together = measured(
        between,
        QUANTITY,
        sum(each.num_values for each in outputs),
        max(each.largest for each in outputs),
        max(each.mean for each in outputs),
        _same_classes(first, second, config) if config.meaning == "classes" else None,
    )
    return together, *found


def _of_output(
    between: tuple[str, str], name: str, first: NDArray[Any], second: NDArray[Any], batched: bool
) -> list[Difference]:
    quantity = f"output {name}"
    if first.dtype.kind != "f":
        gaps = first != second
        return [measured(between, quantity, gaps.size, float(gaps.any()), float(gaps.mean()) if gaps.size else 0.0)]
    one, other = first.astype(np.float64), second.astype(np.float64)
    unlike = one != other  # infinities of one sign are alike; NaN never is
    if not (np.isfinite(one[unlike]).all() and np.isfinite(other[unlike]).all()):
        raise InputError(f"{' or '.join(between)} computes NaN or infinity in {name}; compress the model again")
    finite = np.isfinite(one)
    one, other = np.where(finite, one, 0), np.where(finite, other, 0)
    gaps = np.abs(one - other) / _spread(one, batched)
    rows = len(one) if batched else 1
    apart = _cosine_distances(one.reshape(rows, -1), other.reshape(rows, -1)) if one.size else np.zeros(1)
    largest, mean = (float(gaps.max()), float(gaps.mean())) if gaps.size else (0.0, 0.0)
    return [
        measured(between, quantity, gaps.size, largest, mean),
        measured(between, f"cosine distance of {name}", len(apart), float(apart.max()), float(apart.mean())),
    ]


def _spread(values: NDArray[np.float64], batched: bool) -> float:
    """Standard deviation from row to row; of what does not vary, its root mean square, or 1."""
    if not values.size:
        return 1.0
    middle = values.mean(0) if batched and len(values) > 1 else values.mean()
    size = float(np.sqrt(np.square(values).mean()))
    spread = float(np.sqrt(np.square(values - middle).mean()))
    return spread if spread > 1e-6 * size else size or 1.0


def _cosine_distances(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    distances = np.clip(1 - (one * other).sum(1) / np.where(lengths > 0, lengths, 1), 0, 2)
    return np.where((one == other).all(1), 0.0, distances)  # also of rows of zeros


def _same_classes(first: Tensors, second: Tensors, config: GraphConfig) -> float:
    name = config.outputs[0].name
    one, other = first[name], second[name]
    axis = 1 if config.labels and one.shape[-1] != len(config.labels) and one.ndim > 1 else -1
    return float((one.argmax(axis) == other.argmax(axis)).mean())
