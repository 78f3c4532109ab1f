"""The parity record of a graph: tensors of any number, name and type, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.compress.parity.base import NetworkParity
from penjing.core.artifact.onnx_graph import (
    QUANTITY,
    GraphArtifact,
    Tensors,
    graph_differences,
    open_graph_artifact,
    open_graph_session,
    recorded_inputs,
    recorded_outputs,
    run_graph,
    tensors_to_record,
)
from penjing.core.artifact.parity import Difference
from penjing.core.graph.config import GraphConfig
from penjing.core.graph.network import Network

RECORD_BYTES = 1 << 20  # of inputs and outputs together


@torch.no_grad()
def probe(network: Network, inputs: Sequence[Tensor], samples: int) -> tuple[Tensor, ...]:
    """At most `samples` rows of `inputs`, fewer where inputs and outputs are large; all if axis 0 is not the batch."""
    if not network.config.batched:
        return tuple(inputs)
    rows = len(inputs[0])
    size = sum(value.nbytes for value in (*inputs, *network(*inputs)))
    count = max(2, min(samples, rows, RECORD_BYTES * rows // max(size, 1)))
    return tuple(value[:count] for value in inputs)


class GraphParity(NetworkParity[GraphArtifact, Tensors]):
    """Tensors by the names of the inputs → tensors by the names of the outputs."""

    family = "graph"
    quantity = QUANTITY
    statistic = "mean"
    hint = "raise parity_bound if that is acceptable, or keep the last layers in floating point"

    def __init__(self, tensors: Tensors, config: GraphConfig) -> None:
        self._tensors = tensors
        self._config = config

    @classmethod
    def with_inputs(cls, inputs: Sequence[Tensor], config: GraphConfig) -> Self:
        """Of `inputs` in the order of the network's."""
        return cls(_named(config.inputs, inputs), config)

    @staticmethod
    def open(folder: Path) -> GraphArtifact:
        return open_graph_artifact(folder)

    @classmethod
    def of(cls, artifact: GraphArtifact) -> tuple[Self, Tensors]:
        record, config = artifact.parity, artifact.config
        return cls(recorded_inputs(record, config), config), recorded_outputs(record, config, record.bound.between[0])

    def inputs(self) -> dict[str, Any]:
        return tensors_to_record(self._tensors)

    def run(self, file: Path, options: dict[str, str], optimise: bool) -> Tensors:
        session = open_graph_session(file, self._config, options, threads=1, optimise=optimise)
        return run_graph(session, self._config, self._tensors)

    def stored(self, answers: Tensors) -> dict[str, Any]:
        return tensors_to_record(answers)

    def differences(self, between: tuple[str, str], first: Tensors, second: Tensors) -> tuple[Difference, ...]:
        return graph_differences(between, first, second, self._config)

    def given(self) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(self._tensors[spec.name]) for spec in self._config.inputs)

    def read(self, outputs: Sequence[Tensor]) -> Tensors:
        return _named(self._config.outputs, outputs)


def _named(specs: Sequence[Any], values: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
    return {spec.name: np.ascontiguousarray(value.numpy()) for spec, value in zip(specs, values, strict=True)}
