"""An ONNX file becomes a `Network` that answers as ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.graph.compare import CLOSE, HALF, Measure, farthest, judged, widened
from penjing.core.graph.config import Meaning, Pixels
from penjing.core.graph.network import Network, tensors_of
from penjing.core.graph.trace import from_torch, without_ones
from penjing.core.onnx_reader.example import Input, candidates, inputs_of
from penjing.core.onnx_reader.file import read_onnx
from penjing.core.onnx_reader.module import OnnxModule
from penjing.core.onnx_reader.oracle import Oracle
from penjing.core.progress import plural

BATCH = 2  # of the example: a size of one would be taken for a constant


@dataclass(frozen=True)
class Imported:
    """A network, and how far its answers are from those of the original.

    Attributes:
        parity: what `judged` returns, for the manifest.
    """

    network: Network
    parity: dict[str, Any]


def from_onnx(
    path: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    fixed: Mapping[str, float] | None = None,
    meaning: Meaning = "tensors",
    labels: Sequence[str] = (),
    pixels: Pixels | None = None,
    tolerance: float | None = None,
) -> Imported:
    """The network of an ONNX file, compared with ONNX Runtime.

    Args:
        path: with operators of version 7 to 24; weights may lie in files beside it.
        shapes: sizes of the example, by input; what the file fixes cannot be changed.
        dynamic: input → axis → name of what may differ from call to call, instead of what the file says.
        fixed: inputs that get one value forever, such as a sampling rate; the network has them no more.
        meaning, labels, pixels: see `GraphConfig`.
        tolerance: a share of the output's scale, larger than 1e-5, by which answers may differ; the record says so.

    Raises:
        InputError: the file is damaged, or penjing cannot compute it, or it computes something else than ONNX
            Runtime does; says which operator.
    """
    model, oracle = read_onnx(path), Oracle(path)
    name = path.name
    every = inputs_of(model, name, shapes or {})
    values = _fixed(every, fixed or {}, name)
    inputs = [one for one in every if one.name not in values]
    if not inputs:
        raise InputError(f"{name}: every input is fixed, so there is nothing to compress")
    example = _suiting(oracle, inputs, shapes or {}, values)
    module = OnnxModule(model, name, values)
    axes = (
        {one.name: dict(one.names) for one in inputs}
        if dynamic is None
        else {one.name: dict(dynamic.get(one.name, {})) for one in inputs}
    )
    if dynamic is not None and (odd := sorted(set(dynamic) - {one.name for one in inputs})):
        raise InputError(f"{name} has no input {odd[0]!r}; its inputs are {', '.join(one.name for one in inputs)}")
    for one in inputs:
        for axis, word in axes[one.name].items():
            if not 0 <= axis < len(one.shape):
                raise InputError(
                    f"{name}: --dynamic {one.name}:{axis}={word}: the input has "
                    f"{plural(len(one.shape), 'axis', 'axes')}, "
                    f"0 to {len(one.shape) - 1}"
                )
    example = _open(oracle, example, axes, values)
    with torch.no_grad():
        module(*[example[one.name] for one in inputs])
    network = from_torch(
        module,
        [example[one.name] for one in inputs],
        dynamic={module.input_names[one]: found for one, found in axes.items()},
        meaning=meaning,
        labels=labels,
        pixels=pixels,
    )
    parity = _compared(network, module, oracle, {**example, **values}, name, tolerance)
    return Imported(network, parity)


def _fixed(inputs: list[Input], fixed: Mapping[str, float], path: str) -> dict[str, Tensor]:
    known = {one.name: one for one in inputs}
    found = {}
    for name, value in fixed.items():
        if name not in known:
            raise InputError(f"{path} has no input {name!r}; its inputs are {', '.join(known)}")
        shape, dtype = [1 if size is None else size for size in known[name].shape], known[name].dtype
        if not dtype.is_floating_point:
            least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            if not float(value).is_integer() or not least <= value <= most:
                raise InputError(f"{path}: --fix {name}={value:g}: write a whole number from {least} to {most}")
        found[name] = torch.full(shape, value, dtype=dtype)
    return found


def _suiting(
    oracle: Oracle, inputs: list[Input], shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """An example that the network runs on."""
    first: InputError | None = None
    for batch in (BATCH, 1):
        for example in candidates(inputs, shapes, batch):
            try:
                oracle.answers({**example, **values})
            except InputError as error:
                first = first or error
            else:
                return example
    assert first is not None
    raise InputError(f"{first}; say a shape that suits it with --input NAME:1x3x48x320")


def _open(
    oracle: Oracle, example: dict[str, Tensor], axes: Mapping[str, Mapping[int, str]], values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The example with twos for ones in open axes, if ONNX Runtime takes it so: a one would be taken for a constant."""
    more = dict(zip(example, without_ones(list(example.values()), [axes[name] for name in example]), strict=True))
    if all(more[name] is value for name, value in example.items()):
        return example
    try:
        oracle.answers({**more, **values})
    except InputError:
        return example
    return more


def _compared(
    network: Network,
    module: OnnxModule,
    oracle: Oracle,
    example: Mapping[str, Tensor],
    path: str,
    tolerance: float | None,
) -> dict[str, Any]:
    def as_stored() -> float:
        with torch.no_grad():
            ours, theirs = network(*network.inputs()), oracle.answers(example)
        for spec, one, other in zip(network.config.outputs, ours, theirs, strict=True):
            if one.dtype != other.dtype:
                kinds = [str(value.dtype).removeprefix("torch.") for value in (one, other)]
                raise InputError(
                    f"{path}: the imported network's {spec.name} is {kinds[0]}, and that of ONNX Runtime {kinds[1]}; "
                    "please report this"
                )
        return farthest(ours, theirs)

    def in_float32() -> float:
        return farthest(widened(network, torch.float32)(network.inputs()), oracle.answers_in_float32(example))

    def in_float64() -> float:
        return farthest(widened(network, torch.float64)(network.inputs()), oracle.answers_in_float64(example))

    runtime = f"onnxruntime {oracle.version}"
    held = [*tensors_of(network.module).values(), *network.inputs()]
    measures: list[Measure] = [(runtime, as_stored)]
    if any(value.dtype in HALF for value in held):
        measures.append((f"{runtime}, both in float32", in_float32))
    measures.append(("onnx's own evaluator, both in float64", in_float64))

    def hint() -> str:
        where = oracle.first_difference(module, example, CLOSE)
        return f"the first operator that differs is {where}" if where else ""

    return judged(path, measures, tolerance, hint)
