"""Each operator of ONNX against ONNX Runtime: computed at once, and traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from penjing.core.graph.compare import distance
from penjing.core.graph.trace import from_torch
from penjing.core.onnx_reader.module import OPERATORS, OnnxModule
from tests.core.onnx_reader.cases import CASES, Case

_OPTIONS = onnxruntime.SessionOptions()
_OPTIONS.log_severity_level = 4


def _module(case: Case) -> tuple[OnnxModule, list[Tensor]]:
    inputs = [torch.from_numpy(np.array(value)) for value in case.inputs]
    return OnnxModule(ir.serde.deserialize_model(case.model()), str(case)), inputs


def _theirs(case: Case) -> list[Any]:
    session = onnxruntime.InferenceSession(case.model().SerializeToString(), _OPTIONS)
    return list(session.run(None, {f"x{index}": value for index, value in enumerate(case.inputs)}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_operator_computes_what_onnx_runtime_does(case: Case) -> None:
    module, inputs = _module(case)
    with torch.no_grad():
        ours = module(*inputs)
    for one, other in zip(ours.values(), _theirs(case), strict=True):
        assert one.dtype == torch.from_numpy(np.array(other)).dtype
        assert distance(one, torch.from_numpy(np.array(other))) < case.close


def test_each_operator_has_a_case() -> None:
    assert set(OPERATORS) - {case.operator for case in CASES} == {"NonZero", "Range", "ConstantOfShape", "Scatter"}
    assert len(OPERATORS) > 100


class _All(nn.Module):
    """Every case beside the others, so that tracing begins once."""

    def __init__(self, modules: list[OnnxModule], counts: list[int]) -> None:
        super().__init__()
        self.parts, self.counts = nn.ModuleList(modules), counts

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs, place = [], 0
        for module, count in zip(self.parts, self.counts, strict=True):
            outputs += [value.clone() for value in module(*inputs[place : place + count]).values()]
            place += count
        return outputs


def test_what_is_traced_computes_the_same() -> None:
    cases = [case for case in CASES if case.operator not in ("Shape", "Size")]
    made = [_module(case) for case in cases]
    inputs = [value for _, values in made for value in values]
    with torch.no_grad():
        ours = [value for module, values in made for value in module(*values).values()]
    network = from_torch(
        _All([module for module, _ in made], [len(values) for _, values in made]), (inputs,), dynamic={}
    )
    for one, other in zip(network(*network.inputs()), ours, strict=True):
        assert distance(one, other) < 1e-6
