"""What an import is compared with: ONNX Runtime's answers, and those of ONNX's own evaluator in 64 bits."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from penjing.core.errors import InputError, first_line, runtime_says
from penjing.core.graph.compare import distance, wider
from penjing.core.onnx_reader.file import read_onnx
from penjing.core.onnx_reader.module import OnnxModule
from penjing.core.onnx_reader.wide import widen


class Oracle:
    """ONNX Runtime on the file.

    Raises:
        InputError: ONNX Runtime cannot load it.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        onnxruntime.set_default_logger_severity(4)
        self._path = path
        self._runtime: Any = onnxruntime
        self.version = onnxruntime.__version__
        try:
            self._session = self._opened(path)
        except Exception as error:
            raise InputError(
                f"{path}: ONNX Runtime cannot load it: {runtime_says(error)}; get or export it again"
            ) from None

    def _opened(self, path: Path) -> Any:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # as the file says
        return self._runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def answers(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs, in order.

        Raises:
            InputError: it does not run on these inputs.
        """
        return self._run(self._session, inputs)

    def answers_in_float32(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """ONNX Runtime's outputs where every 16-bit number of the file is one of 32 bits.

        Raises:
            InputError: it does not load or run so.
        """
        model = read_onnx(self._path)
        widen(model, ir.DataType.FLOAT)
        try:
            session = self._saved(model)
        except Exception as error:
            raise InputError(f"ONNX Runtime cannot compute it in float32: {runtime_says(error)}") from None
        return self._run(session, {name: wider(value, torch.float32) for name, value in inputs.items()})

    def answers_in_float64(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs in 64 bits, by the evaluator of the package `onnx`: ONNX Runtime has no such convolutions.

        Raises:
            InputError: an operator that it does not compute, or a file of more than 2 GB.
        """
        from onnx.reference import ReferenceEvaluator

        model = read_onnx(self._path)
        widen(model, ir.DataType.DOUBLE)
        given = {name: wider(value, torch.float64).numpy() for name, value in inputs.items()}
        try:
            with np.errstate(all="ignore"):
                found: list[Any] = ReferenceEvaluator(ir.to_proto(model)).run(None, given)  # type: ignore[assignment]
        except Exception as error:  # each operator raises what it likes
            raise InputError(f"onnx's evaluator cannot compute it in float64: {first_line(error)[:300]}") from None
        return [torch.from_numpy(np.array(value)) for value in found]

    def _run(self, session: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        except Exception as error:
            shapes = ", ".join(f"{name}:{'x'.join(map(str, value.shape))}" for name, value in inputs.items())
            raise InputError(f"{self._path} does not run on {shapes}: {runtime_says(error)}") from None
        return [torch.from_numpy(value) if hasattr(value, "dtype") else torch.empty(0) for value in found]

    def _saved(self, model: ir.Model) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.onnx"
            ir.save(model, file, external_data="weights")
            return self._opened(file)

    def first_difference(self, module: OnnxModule, inputs: Mapping[str, Tensor], bound: float) -> str:
        """The first operator whose result differs, as a message names it; "" where none does."""
        with torch.no_grad():
            _, values = module.compute(*[inputs[name] for name in module.input_names])
        model = ir.load(self._path)
        shown = [
            (node, output)
            for node in model.graph
            for output in node.outputs
            if isinstance(values.get(str(output.name)), Tensor)
        ]
        outputs = set(map(id, model.graph.outputs))
        model.graph.outputs.extend(output for _, output in shown if id(output) not in outputs)
        names = [str(output.name) for output in model.graph.outputs]
        try:
            theirs = dict(zip(names, self._run(self._saved(model), inputs), strict=True))
        except Exception:  # a diagnosis that fails must not hide what it was to explain
            return ""
        for node, output in shown:
            ours = values[str(output.name)]
            if isinstance(ours, Tensor) and not distance(ours, theirs[str(output.name)]) <= bound:
                return f"{node.op_type} {node.name or output.name}"
        return ""
