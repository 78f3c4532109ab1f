"""An ONNX file as an `onnx_ir` model: checked, functions inlined, constants lifted out of nodes."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common

from penjing.core.errors import InputError, first_line

OPSETS = range(7, 25)
LARGEST_FILE = 1 << 31  # a protobuf holds less than 2 GiB
_QUANTIZED = (
    "QuantizeLinear",
    "DynamicQuantizeLinear",
    "QLinearConv",
    "QLinearMatMul",
    "ConvInteger",
    "MatMulInteger",
)


def external_files(path: Path) -> list[str]:
    """The files beside `path` that hold its weights, relative to its folder.

    Raises:
        InputError: what `read_onnx` refuses in it or in them.
    """
    graphs = _loaded(path).graphs()
    tensors = [value.const_value for graph in graphs for value in graph.initializers.values()]
    return sorted({str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)})


def read_onnx(path: Path) -> ir.Model:
    """The model of `path`, with its version of the operators in `model.opset_imports[""]`.

    Raises:
        InputError: missing, truncated, larger than a protobuf can be, of another version than 7 to 24, quantized
            already, with operators of another domain, or with weights that are missing or lie outside its folder.
    """
    model = _loaded(path)
    passes = (
        common.InlinePass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.TopologicalSortPass(),
    )
    try:
        for change in passes:
            model = change(model).model
    except Exception as error:  # what a pass makes of a file that is damaged in another way
        raise InputError(f"{path} is damaged: {first_line(error)}; get it again") from None
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type in _QUANTIZED:
            raise InputError(
                f"{path} is quantized already ({node.op_type} {node.name}); import the floating-point original, or "
                "serve the file as it is"
            )
    _tell_apart(model)
    return model


def _loaded(path: Path) -> ir.Model:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    if size >= LARGEST_FILE:
        raise InputError(
            f"{path} has {size / 1e9:.1f} GB, and a protobuf holds 2; write it again with its weights in a file of "
            "their own: onnx.save(model, path, save_as_external_data=True)"
        )
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf and onnx-ir raise many kinds
        raise InputError(f"{path} is no complete ONNX file ({first_line(error)}); get it again") from None
    if not len(model.graph) and not model.graph.outputs:
        raise InputError(f"{path} is no complete ONNX file (it holds no operators); get it again")
    version = model.opset_imports.get("", model.opset_imports.get("ai.onnx"))
    if version is None or version not in OPSETS:
        raise InputError(
            f"{path} has version {version} of the ONNX operators; versions {OPSETS[0]} to {OPSETS[-1]} are read, so "
            "convert it: onnx.version_converter.convert_version(model, 17)"
        )
    _check_external(model, path)
    _check_domains(model, path)
    return model


def _tell_apart(model: ir.Model) -> None:
    """Branches may use names of each other; afterwards each name is one value's, as a table of them all needs."""
    taken: set[str] = set()
    for graph in model.graphs():
        for value in (*graph.initializers.values(), *(output for node in graph for output in node.outputs)):
            said, number = value.name, 1
            while value.name and value.name in taken:
                number += 1
                value.name = f"{said}_{number}"
            taken.add(str(value.name))


def _check_external(model: ir.Model, path: Path) -> None:
    folder = path.resolve().parent
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            try:
                place = (folder / str(tensor.location)).resolve()
                there = place.is_file()
            except (OSError, ValueError) as error:
                said = str(tensor.location)[:200]
                raise InputError(f"{path}: {said!r} can be the name of no file ({error!s:.200})") from None
            if not place.is_relative_to(folder):
                raise InputError(
                    f"{path}: {value.name} lies in {tensor.location}, outside the folder of the file; put the weights "
                    "beside it"
                )
            if not there:
                raise InputError(f"{path}: {tensor.location} with {value.name} is missing; put it beside the file")
            end = (tensor.offset or 0) + (tensor.length if tensor.length is not None else tensor.nbytes)
            if end > place.stat().st_size:
                raise InputError(f"{place} ends before {value.name} does; get it again")


def _check_domains(model: ir.Model, path: Path) -> None:
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain not in ("", "ai.onnx") and node.op_identifier() not in model.functions:
            raise InputError(
                f"{path}: {node.op_type} {node.name} is of the domain {node.domain!r}, which is no part of ONNX; "
                "export the network with operators of ONNX"
            )
