"""ONNX Runtime's answers to the same inputs: what an import is compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.graph.network import Network, set_tensor, tensors_of
from penjing.core.onnx_reader.module import OnnxModule

CLOSE = 1e-5
"""How far an answer may be from ONNX Runtime's, as a share of the output's largest value."""
HALF = 2e-2  # the same for 16-bit numbers
PROBABLE = 0.03
"""Least scale of what lies between 0 and 1: a sigmoid of float32 errs by 1e-7 whatever its value."""
NOISE = 4.0
"""… or this many times what one rounding of each weight and input moves it: deep networks enlarge roundings."""


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
            raise InputError(f"{path}: ONNX Runtime cannot load it: {_first(error)}; get or export it again") from None

    def _opened(self, path: Path) -> Any:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        return self._runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def answers(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs, in order.

        Raises:
            InputError: it does not run on these inputs.
        """
        return self._run(self._session, inputs)

    def _run(self, session: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        except Exception as error:
            shapes = ", ".join(f"{name}:{'x'.join(map(str, value.shape))}" for name, value in inputs.items())
            raise InputError(f"{self._path} does not run on {shapes}: {_first(error)}") from None
        return [torch.from_numpy(value) if hasattr(value, "dtype") else torch.empty(0) for value in found]

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
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "every.onnx"
            try:
                ir.save(model, file, external_data="weights")
                theirs = dict(zip(names, self._run(self._opened(file), inputs), strict=True))
            except Exception:  # a diagnosis that fails must not hide what it was to explain
                return ""
        for node, output in shown:
            ours = values[str(output.name)]
            if isinstance(ours, Tensor) and not distance(ours, theirs[str(output.name)]) <= bound:
                return f"{node.op_type} {node.name or output.name}"
        return ""


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where shapes or what is no number differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    one, other = ours.detach().double(), theirs.double()
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (one - other).abs())
    known = other[other.isfinite()]
    scale = known.abs().max().item() if known.numel() else 0.0
    if known.numel() and theirs.is_floating_point() and known.min() >= 0 and known.max() <= 1:
        scale = max(scale, PROBABLE)
    largest = gap.max().item()
    return largest if largest == 0 or not largest < float("inf") else largest / max(scale, 1e-30)


def noise(network: Network) -> float:
    """How far one rounding of each weight and input moves the outputs, as a share of their scale."""
    generator = torch.Generator().manual_seed(0)

    def rounded(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        return value * (1 + (torch.rand(value.shape, generator=generator) - 0.5) * 2 * torch.finfo(value.dtype).eps)

    moved = network.copy()
    with torch.no_grad():
        for name, value in tensors_of(moved.module).items():
            set_tensor(moved.module, name, rounded(value.detach()).to(value.dtype))
        still = network(*network.inputs())
        turned = moved(*[rounded(value).to(value.dtype) for value in network.inputs()])
    return max(distance(one, other) for one, other in zip(turned, still, strict=True))
