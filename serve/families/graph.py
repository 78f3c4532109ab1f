"""Any quantized graph behind a server, with the network's own inputs and outputs: ONNX Runtime with the options of its
artifact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.onnx import ONNX_RUNTIME
from penjing.core.artifact.onnx_graph import (
    GraphArtifact,
    graph_differences,
    open_graph_artifact,
    recorded_inputs,
    recorded_outputs,
    run_graph,
    tensors_to_record,
)
from penjing.core.artifact.parity import SERVED
from penjing.core.errors import InputError, RequestError, ServerError
from penjing.core.graph import config as graph
from penjing.core.text.network_inputs import texts_of
from penjing.serve.client.protocol import GRAPH, REQUEST_SECONDS
from penjing.serve.client.wire_tensors import DATATYPES
from penjing.serve.families.base import TOO_MANY, Served, Signature, TensorSpec, Workload, in_parts
from penjing.serve.families.batched import batched
from penjing.serve.families.graph_model import GraphModel, GraphSettings, image_inputs, pixel_spec, text_input

if TYPE_CHECKING:
    from penjing.serve.client.client import AsyncClient, Client

Tensors = Mapping[str, NDArray[Any]]
REQUEST_ROWS = 16  # of a request that is timed, and of what ONNX Runtime runs at once alone
ROWS_UNDER_WAY = 256
SAME = 0.05  # of an output's spread, on average; rows in other company may be rounded otherwise


def signature(artifact: GraphArtifact) -> Signature:
    """The network's own tensors; where its first input is an image, `pixels` or encoded images may be given for it, and
    where it has a tokenizer, `text` for all of them."""
    config = artifact.config
    pictures = image_inputs(config)
    own = [_spec(spec, config) for spec in config.inputs]
    inputs = list(own)
    if pictures:
        first = config.inputs[0]
        rows = () if config.batched else (_size(first.shape[0]) if len(first.shape) == 4 else 1,)
        pixels = _spec(pixel_spec(config), config)
        image = TensorSpec(pictures[1], "BYTES", (*rows, 1))
        inputs = [_optional(own[0]), _optional(pixels), _optional(image), *own[1:]]
    elif texts_of(artifact.folder, config.inputs) is not None:
        inputs = [
            *map(_optional, own),
            TensorSpec(text_input(config), "BYTES", (1,) if config.batched else (-1, 1), True),
        ]
    outputs = [_spec(spec, config) for spec in config.outputs]
    if config.meaning == "classes" and config.labels:
        outputs[0] = TensorSpec(outputs[0].name, outputs[0].datatype, outputs[0].shape, labels=config.labels)
    return Signature(GRAPH, tuple(inputs), tuple(own), tuple(outputs), config.batched)


def _spec(spec: graph.TensorSpec, config: graph.GraphConfig) -> TensorSpec:
    shape = tuple(map(_size, spec.shape))
    return TensorSpec(spec.name, DATATYPES[np.dtype(spec.dtype)], shape[1:] if config.batched else shape)


def _size(axis: int | str) -> int:
    return axis if isinstance(axis, int) else -1


def _optional(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.name, spec.datatype, spec.shape, optional=True)


def workload(
    folder: Path, client: Client, *, rows: int = 1024, threads: int = 0, request_rows: int = REQUEST_ROWS
) -> Workload:
    """The inputs of the parity record, again and again: batched, 256 rows are always under way to the server, and alone
    ONNX Runtime runs 16 at once; else a request is what the record holds.

    Args:
        rows: of one turn, or requests where nothing is batched.
        threads: of ONNX Runtime in this process; 0 takes one for each core, as the server does by default.
        request_rows: of one request.

    Raises:
        InputError: the folder is no graph's artifact.
        ServerError: no server answers, or with other outputs than this process: it serves another model.
    """
    artifact = open_graph_artifact(folder)
    config, session = artifact.config, artifact.session(threads)
    recorded = recorded_inputs(artifact.parity, config)
    size = request_rows if config.batched else 1
    given = {name: _repeated(value, size) for name, value in recorded.items()} if config.batched else recorded
    sent = _sent(given, config)
    expected = run_graph(session, config, given)
    try:
        found = _received(client.infer(sent, timeout=REQUEST_SECONDS), config)
        same = graph_differences((ONNX_RUNTIME, SERVED), expected, found, config)[0].mean <= SAME
    except (InputError, RequestError, KeyError) as error:
        if TOO_MANY in str(error):  # which says what to do
            raise
        same = False
    if not same:
        raise ServerError(f"{client.server} answers with other outputs than {folder}: does it serve that artifact?")
    local = {name: _repeated(value, REQUEST_ROWS) for name, value in recorded.items()} if config.batched else recorded
    at_once = REQUEST_ROWS if config.batched else 1

    def alone() -> int:
        count = max(1, rows // at_once)
        for _ in range(count):
            run_graph(session, config, local)
        return count * at_once

    async def ask(client: AsyncClient, tensors: Tensors) -> None:
        await client.infer(tensors, timeout=REQUEST_SECONDS)

    streams = max(1, ROWS_UNDER_WAY // size) if config.batched else 4
    return Workload(
        unit="rows" if config.batched else "requests",
        alone=alone,
        forms={"server": [sent]},
        request_rows=size,
        ask=ask,
        num_requests=max(streams, rows // size),
        streams=streams,
        facts={"request_rows": size},
    )


def parity(folder: Path, client: Client) -> Served:
    """Its outputs beside those of the fake-quantized network in the record, and of ONNX Runtime here and now.

    Raises:
        InputError: damaged, or the endpoint has other outputs.
    """
    artifact = open_graph_artifact(folder)
    config = artifact.config
    given = recorded_inputs(artifact.parity, config)
    local = run_graph(artifact.session(), config, given)
    sent = _sent(given, config)

    def ask(part: slice) -> dict[str, NDArray[Any]]:
        return _received(client.infer({name: value[part] for name, value in sent.items()}), config)

    answers = (
        in_parts(len(next(iter(given.values()))), ask) if config.batched else [_received(client.infer(sent), config)]
    )
    names = [spec.name for spec in config.outputs]
    if missing := [name for name in names if name not in answers[0]]:
        raise InputError(f"the endpoint gives no {missing[0]!r}, {folder} does: it serves another one")
    served = answers[0]
    if config.batched:
        served = {name: np.concatenate([each[name] for each in answers]) for name in names}
    reference = artifact.parity.bound.between[0]
    known = recorded_outputs(artifact.parity, config, reference)
    differences = (
        *graph_differences((reference, SERVED), known, served, config),
        *graph_differences((ONNX_RUNTIME, SERVED), local, served, config),
    )
    same = all(np.array_equal(local[name], served[name]) for name in names)
    return Served(tensors_to_record(served), differences, artifact.parity.bound, same)


def _repeated(value: NDArray[Any], rows: int) -> NDArray[Any]:
    """`rows` rows, those of `value` again and again."""
    return np.ascontiguousarray(value[np.arange(rows) % len(value)])


def _sent(tensors: Tensors, config: graph.GraphConfig) -> dict[str, NDArray[Any]]:
    """As they travel: one number a row, or a tensor without axes, gets an axis; see `base.TensorSpec`."""
    axes = 1 if config.batched else 0
    return {name: value[..., None] if value.ndim == axes else value for name, value in tensors.items()}


def _received(tensors: Tensors, config: graph.GraphConfig) -> dict[str, NDArray[Any]]:
    """The outputs of `config` as the network gives them; others are left as they are."""
    ranks = {spec.name: len(spec.shape) for spec in config.outputs}
    axes = 1 if config.batched else 0
    return {name: value[..., 0] if ranks.get(name) == axes else value for name, value in tensors.items()}


FAMILY = batched(
    name=GRAPH,
    open_artifact=open_graph_artifact,
    signature=signature,
    load=GraphModel,
    how_to_compress="the checkpoint of a graph, and artifacts are served; make one with "
    "'penjing compress quantize {folder} {folder}-int8'",
    settings=GraphSettings,
    workload=workload,
    parity=parity,
)
