"""A small builder of ONNX graphs: nodes in order, each value named after what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

OPSET = 21  # the first with 16-bit types and blocks; per-channel INT8 and FP8 are in it
IR_VERSION = 10
EXTERNAL_BYTES = 1 << 16  # smaller constants stay in the model's own file
EXTERNAL_ALIGNMENT = 1 << 16  # ONNX Runtime maps a tensor that begins on an allocation unit of the system


class GraphBuilder:
    """Adds nodes and constants; `model` makes an ONNX model of them.

    Args:
        data: an open file beside the model, which large constants are appended to as they come, so that they are never
            in memory together (and a model may be larger than protobuf's 2 GB).
    """

    def __init__(self, data: BinaryIO | None = None) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._data = data

    def constant(self, name: str, value: np.ndarray | Tensor) -> str:
        """Store a tensor (also float8_e4m3fn) once under `name`."""
        if name not in self._constants:
            tensor = _tensor(name, value)
            if self._data is not None and len(tensor.raw_data) >= EXTERNAL_BYTES:
                _append(tensor, self._data)
            self._constants[name] = tensor
        return name

    def node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node; returns `output`."""
        self._nodes.append(helper.make_node(operator, inputs, [output], name=f"{output}/{operator}", **attributes))
        return output

    def cast(self, x: str, kind: int, output: str) -> str:
        """`x` as another type."""
        return self.node("Cast", [x], output, to=kind)

    def number(self, value: int | list[int]) -> str:
        """An int64 constant."""
        name = "_".join(map(str, value)) if isinstance(value, list) else f"scalar_{value}"
        return self.constant(f"int64/{name}", np.array(value, np.int64))

    def float(self, value: float) -> str:
        """A float32 constant."""
        return self.constant(f"float32/{value!r}", np.array(value, np.float32))

    def model(
        self,
        inputs: dict[str, list[Any]],
        outputs: dict[str, list[Any]],
        about: dict[str, str],
        integers: tuple[str, ...] = (),
    ) -> Any:
        """The model, checked unless its constants lie in another file; shapes hold numbers and names of dynamic sizes.

        Args:
            integers: the inputs that are int64; all others are float32.

        Raises:
            onnx.checker.ValidationError: the graph is not valid ONNX, a bug here.
        """
        kinds = dict.fromkeys(inputs, TensorProto.FLOAT) | dict.fromkeys(integers, TensorProto.INT64)
        graph = helper.make_graph(
            self._nodes,
            "penjing",
            [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
            list(self._constants.values()),
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="penjing"
        )
        helper.set_model_props(model, about)
        if self._data is None:
            onnx.checker.check_model(model, full_check=True)
        return model


def _tensor(name: str, value: np.ndarray | Tensor) -> onnx.TensorProto:
    if isinstance(value, Tensor):
        if value.dtype == torch.float8_e4m3fn:
            data = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
            return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, list(value.shape), data, raw=True)
        value = value.detach().contiguous().numpy()
    return numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name)


def _append(tensor: onnx.TensorProto, file: BinaryIO) -> None:
    """Move the content of `tensor` to the end of `file`, which it then refers to by name."""
    file.seek(-(-file.tell() // EXTERNAL_ALIGNMENT) * EXTERNAL_ALIGNMENT)
    place = {"location": Path(file.name).name, "offset": str(file.tell()), "length": str(len(tensor.raw_data))}
    file.write(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in place.items())
