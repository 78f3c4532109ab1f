"""The parity record of a graph: the fake-quantized network against every way in which ONNX Runtime may run its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.compress.graph.integers import IntegerRun
from penjing.compress.graph.roundings import roundings
from penjing.compress.quantize.targets import NO_TENSORRT
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx import ONNX_RUNTIME, Quantization, gate_onnx
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
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Difference, Parity
from penjing.core.graph.config import GraphConfig
from penjing.core.graph.network import Network
from penjing.core.progress import Progress

HINT = "raise parity_bound if that is acceptable, or keep the last layers in floating point"
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


@torch.no_grad()
def measure(
    network: Network,
    stored: Network,
    onnx_file: Path,
    quantization: Quantization,
    inputs: Sequence[Tensor],
    bound: float,
) -> tuple[Parity, Difference]:
    """Run `inputs` through `stored`, whose sums are exact (`IntegerRun`), and through `onnx_file`
    (`Quantization.ways`), and hold `network` to it layer by layer (`roundings`).

    Args:
        network: calibrated or trained, in evaluation mode.
        stored: what was made of it for the file.
        bound: of the mean difference of outputs, in ONNX Runtime with the options that the artifact asks for.

    Returns:
        The artifact's record, and how far the layers of `network` are from it.

    Raises:
        InputError: a bound is exceeded (an artifact that does so is refused), or there is NaN.
    """
    config = network.config
    given = _named(config.inputs, inputs)
    reference = IntegerRun(stored)
    answers: dict[str, Tensors] = {FAKE_QUANTIZED: _named(config.outputs, reference.run(*inputs))}
    held = roundings(network, reference.codes, inputs)
    answers |= _in_onnx_runtime(onnx_file, quantization, config, given)
    limit = Bound(between=(FAKE_QUANTIZED, ONNX_RUNTIME), quantity=QUANTITY, statistic="mean", value=bound)
    parity = Parity(
        family="graph",
        inputs=tensors_to_record(given),
        outputs={name: tensors_to_record(values) for name, values in answers.items()},
        differences=_gated(answers, config, limit),
        bound=limit,
        unmeasured={"tensorrt": NO_TENSORRT} if quantization.target == "tensorrt" else {},
    )
    return parity, held


def rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    """Run the record's inputs through the artifact in `folder` again, here and now; every hash is checked.

    Raises:
        InputError: damaged, or ONNX Runtime on this machine is further from the fake-quantized network than the
            record's bound.
    """
    artifact = open_graph_artifact(folder)
    progress.start("parity", 1)
    differences = compare_graph_file(artifact, folder / MODEL_FILE)
    progress.advance()
    return differences


def compare_graph_file(artifact: GraphArtifact, file: Path) -> tuple[Difference, ...]:
    """Run the record's inputs through `file`, the artifact's own or an export that takes its place.

    Raises:
        InputError: beyond the record's bound.
    """
    record, config = artifact.parity, artifact.config
    answers: dict[str, Tensors] = {FAKE_QUANTIZED: recorded_outputs(record, config, FAKE_QUANTIZED)}
    given = recorded_inputs(record, config)
    return _gated(answers | _in_onnx_runtime(file, artifact.quantization, config, given), config, record.bound)


def _in_onnx_runtime(
    file: Path, quantization: Quantization, config: GraphConfig, inputs: Tensors
) -> dict[str, Tensors]:
    return {
        name: run_graph(open_graph_session(file, config, entries, threads=1, optimise=optimise), config, inputs)
        for name, (entries, optimise) in quantization.ways().items()
    }


def _gated(answers: dict[str, Tensors], config: GraphConfig, bound: Bound) -> tuple[Difference, ...]:
    first = answers[FAKE_QUANTIZED]
    differences = tuple(
        difference
        for name, other in answers.items()
        if name != FAKE_QUANTIZED
        for difference in graph_differences((FAKE_QUANTIZED, name), first, other, config)
    )
    gate_onnx(differences, bound, HINT)
    return differences


def _named(specs: Sequence[Any], values: Sequence[Tensor]) -> dict[str, NDArray[Any]]:
    return {spec.name: np.ascontiguousarray(value.numpy()) for spec, value in zip(specs, values, strict=True)}
