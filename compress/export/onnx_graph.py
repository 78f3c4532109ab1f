"""Any network as ONNX, with the names of its inputs and outputs: floating, or with explicit Q/DQ.

torch's exporter translates the operators, most of them one to one; those of rounding (`rounding/stored.py`) are
translated here. Then what it needs of sizes at run time is written as constants, and what only its makers read is
left out, so that the same network always gives the same bytes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import opset21 as op
from torch.export import Dim, ExportedProgram

from penjing.compress.export.onnx_fusions import fold_pads, integer_products, keep_apart, own_zeros, rank_few
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.compress.rounding.stored import AVERAGED, QUANTIZED, WIDENED
from penjing.core.errors import InputError, first_line
from penjing.core.files import atomic_write_bytes
from penjing.core.graph.apart import leave_whole, take_apart
from penjing.core.graph.attention import open_attention
from penjing.core.graph.network import Network, operator_name, propagate
from penjing.core.graph.trace import without_stacks

OPSET = 21  # the first with 16-bit types and blocks; per-channel INT8 and FP8 are in it
IR_VERSION = 10
LARGEST_BYTES = 2_000_000_000  # of a file in protobuf


def export_network(network: Network, path: Path, about: dict[str, str], target: TargetName | None = None) -> int:
    """Write `network`, in evaluation mode, to `path`: inputs and outputs are called as in its config.

    Args:
        about: properties of the file.
        target: what the file is for, which is noted in it; None for a floating network.

    Returns:
        Bytes written.

    Raises:
        InputError: an operator has no form in ONNX, or the file would be larger than protobuf allows.
    """
    size = sum(tensor.nbytes for tensor in network.module.state_dict().values())
    if size > LARGEST_BYTES:
        raise InputError(f"the network's weights take {size / 1e9:.1f} GB, a file of ONNX at most 2; quantize it first")
    program = _exported(network)
    model = _translated(program)
    _with_constant_shapes(model.graph)
    biased = integer_products(model.graph) if target and TARGETS[target].integer_products else set()
    fold_pads(model.graph)
    rank_few(model.graph)
    keep_apart(model.graph, biased)
    common.RemoveUnusedNodesPass()(model)
    own_zeros(model.graph)
    _named(model.graph, network)
    _bared(model)
    model.metadata_props.update(about | ({"penjing.target": target} if target else {}))
    model.producer_name, model.ir_version = "penjing", IR_VERSION
    data = ir.to_proto(model).SerializeToString(deterministic=True)
    onnx.checker.check_model(data, full_check=True)
    atomic_write_bytes(path, data)
    return len(data)


def _exported(network: Network) -> ExportedProgram:
    network = network.copy()
    propagate(network)
    module = network.module
    open_attention(module.graph)
    for node in module.graph.nodes:
        pools = operator_name(node) == "adaptive_avg_pool2d" and list(node.args[1]) == [1, 1]
        if pools and node.args[0].meta["val"].dim() == 4:
            node.target, node.args = AVERAGED, node.args[:1]
    take_apart(module.graph)
    module.recompile()
    shapes = {
        node.target: {axis: Dim.AUTO for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for node, spec in zip(module.graph.find_nodes(op="placeholder"), network.config.inputs, strict=True)
    }
    try:
        with torch.no_grad(), without_stacks():
            program = torch.export.export(module, network.inputs(), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export has no base of its own for what it raises
        raise InputError(f"the network cannot be written as ONNX: {first_line(error)}") from error
    leave_whole(program)
    return program


def _translated(program: ExportedProgram) -> ir.Model:
    table: Any = {
        AVERAGED: _averaged,
        QUANTIZED: _quantized,
        WIDENED: _widened,
        torch.ops.aten.sort.stable: _sorted,
        torch.ops.aten.upsample_linear1d.default: partial(_resized, "linear"),
        torch.ops.aten.upsample_bilinear2d.default: partial(_resized, "linear"),
        torch.ops.aten.upsample_trilinear3d.default: partial(_resized, "linear"),
        torch.ops.aten.upsample_bicubic2d.default: partial(_resized, "cubic"),
    }
    try:
        with _quiet(), without_stacks():
            made = torch.onnx.export(
                program, opset_version=OPSET, dynamo=True, verbose=False, custom_translation_table=table
            )
    except Exception as error:
        cause = error.__cause__ or error
        raise InputError(f"the network cannot be written as ONNX: {first_line(cause)}") from error
    assert made is not None
    return made.model  # type: ignore[return-value]


def _averaged(x: Any) -> Any:
    return op.GlobalAveragePool(x)


def _quantized(x: Any, scale: Any, zero: Any) -> Any:
    stored: Any = op.QuantizeLinear(x, scale, zero)
    return op.DequantizeLinear(stored, scale, zero)


def _widened(stored: Any, scale: Any, zero: Any, axis: int) -> Any:
    return op.DequantizeLinear(stored, scale, zero, axis=axis)


def _sorted(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """TopK of all, for it has the first of equal values first."""
    size: Any = op.Shape(x, start=dim, end=dim + 1 or None)
    return op.TopK(x, size, axis=dim, largest=int(descending))


def _resized(mode: str, x: Any, size: Any, aligned: bool, a: Any = None, b: Any = None, c: Any = None) -> Any:
    """By its factors where torch computes places by them. Its own translation leaves them out, and so computes places
    by the sizes, which are cut off to integers."""
    factors = [factor for factor in (a, b, c) if factor is not None]
    if factors and not aligned:
        scales: Any = op.Constant(value_floats=[1.0, 1.0, *factors])
        return op.Resize(x, None, scales, mode=mode, coordinate_transformation_mode="half_pixel")
    rule = "align_corners" if aligned else "half_pixel"
    kept: Any = op.Shape(x, end=2)
    space: Any = op.Cast(size, to=ir.DataType.INT64)
    sizes: Any = op.Concat(kept, space, axis=0)
    return op.Resize(x, None, None, sizes, mode=mode, coordinate_transformation_mode=rule)


def _with_constant_shapes(graph: ir.Graph) -> None:
    """Reshape by constants where that can be said: 0 keeps a size of the input, and one size may be left open."""
    for node in graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or node.inputs[1].const_value is not None:
            continue
        source, result = node.inputs[0], node.outputs[0]
        if source is None or source.shape is None or result.shape is None:
            continue
        sizes: list[int] = []
        for axis, size in enumerate(result.shape):
            if isinstance(size, int):
                sizes.append(size)
            elif axis < len(source.shape) and source.shape[axis] == size and size.value is not None:
                sizes.append(0)
            else:
                sizes.append(-1)
        known = [size for size in result.shape if isinstance(size, int)]
        if sizes.count(-1) > 1 or 0 in known:
            continue
        constant = ir.Value(name=f"{result.name}_shape", const_value=ir.tensor(sizes, dtype=ir.DataType.INT64))
        constant.type, constant.shape = ir.TensorType(ir.DataType.INT64), ir.Shape([len(sizes)])
        graph.register_initializer(constant)
        node.replace_input_with(1, constant)
        node.attributes.pop("allowzero", None)


def _named(graph: ir.Graph, network: Network) -> None:
    """Inputs, outputs and their axes as the config calls them."""
    for values, specs in ((graph.inputs, network.config.inputs), (graph.outputs, network.config.outputs)):
        assert len(values) == len(specs), f"{len(values)} values for {len(specs)} names"
        wanted = {spec.name for spec in specs}
        for value in list(_values(graph)):
            if value.name in wanted and value not in values:
                value.name = f"{value.name}_inside"
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            value.shape = ir.Shape(list(spec.shape))


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _bared(model: ir.Model) -> None:
    """Drop what describes where nodes came from: lines of code and places of files."""
    model.doc_string = model.graph.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *_values(model.graph)):
        value.metadata_props.clear()
        value.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporter says of packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
