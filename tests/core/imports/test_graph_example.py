"""`penjing import` of functions: which axes stay open, and what is said of an example that does not suit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import InputError
from penjing.core.imports.graph import graph_options, import_graph
from penjing.core.progress import Silent

SOURCE = """
import torch
from tests.core.graph.networks import Residual

def residual():
    return Residual(), torch.randn(1, 3, 16, 16)

def flat():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)), torch.randn(1, 3, 4)

class OneRow(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.view(1, -1))

def one_row():
    return OneRow(12, 2), torch.randn(1, 3, 4)

def unfit():
    return OneRow(12, 2), torch.randn(1, 3, 5)

class Branches(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

def branches():
    return Branches(3, 2), torch.randn(2, 3)
"""


BESIDE = """
import torch

def made():
    return torch.nn.Linear(3, 2), torch.randn(2, 3)
"""


class Heard(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "my_models.py"
    path.write_text(SOURCE)
    return str(path)


def test_code_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_models.py").write_text(BESIDE)
    (tmp_path / "net.py").write_text("from neighbour_of_models import made\n\ndef build():\n    return made()\n")
    heard = Heard()
    import_graph(f"{tmp_path}/net.py:build", tmp_path / "out", progress=heard)
    assert heard.notes[0].startswith(f"{tmp_path}/out: 1 operator, 8 parameters (input: float32[batch, 3], ")


def test_a_named_axis_stays_open_where_the_example_has_one_row(models: str, tmp_path: Path) -> None:
    options = graph_options(dynamic=["images:0=batch,2=rows,3=columns"])
    network = load_network(import_graph(f"{models}:residual", tmp_path / "out", options))
    assert network.config.inputs[0].shape == ("batch", 3, "rows", "columns")
    assert network(torch.randn(5, 3, 16, 20))[0].shape == (5, 10)


def test_a_named_axis_that_the_network_fixes_is_said(models: str, tmp_path: Path) -> None:
    heard = Heard()
    options = graph_options(dynamic=["input:0=batch,2=width"])
    out = import_graph(f"{models}:flat", tmp_path / "out", options, progress=heard)
    assert load_network(out).config.inputs[0].shape == ("batch", 3, 4)
    assert [note for note in heard.notes if "--dynamic" in note] == [
        "--dynamic input:2=width: the network takes one size alone there, so it is fixed"
    ]


def test_weights_that_are_no_numbers_are_said(tmp_path: Path) -> None:
    heard = Heard()
    lines = ["import torch", "def build():", "    net = torch.nn.Linear(4, 2)"]
    lines += ["    net.weight.data[0, 1] = float('nan')", "    return net, torch.randn(1, 4)"]
    (tmp_path / "net.py").write_text("\n".join(lines))
    import_graph(f"{tmp_path}/net.py:build", tmp_path / "out", progress=heard)
    assert heard.notes[1].startswith("weight holds NaN at 1 of 8 places, which every answer may become; ")


def test_a_network_of_one_row_comes_in_with_one_row(models: str, tmp_path: Path) -> None:
    network = load_network(import_graph(f"{models}:one_row", tmp_path / "out"))
    assert network.config.inputs[0].shape == (1, 3, 4)


def test_an_example_on_which_the_module_does_not_run_is_told(models: str, tmp_path: Path) -> None:
    said = r"OneRow does not run on its example: .*\(1x15 and 12x2\); mend the network, or give another example"
    with pytest.raises(InputError, match=said):
        import_graph(f"{models}:unfit", tmp_path / "out")


def test_a_branch_by_values_is_told_without_what_torch_prints(
    models: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=r"cannot be exported: .*control flow does not depend on values"):
        import_graph(f"{models}:branches", tmp_path / "out")
    assert capfd.readouterr() == ("", "")


HALVES = """
import torch

def made(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(dtype)

def bfloat16():
    return made(torch.bfloat16)

def float64():
    return made(torch.float64), torch.randn(2, 8, dtype=torch.float64)
"""


@pytest.mark.parametrize("name", ["bfloat16", "float64"])
def test_a_module_of_another_type_becomes_float32_if_asked(tmp_path: Path, name: str) -> None:
    (tmp_path / "nets.py").write_text(HALVES)
    inputs = [] if name == "float64" else ["input:2x8"]
    out = import_graph(f"{tmp_path}/nets.py:{name}", tmp_path / "out", graph_options(inputs=inputs, dtype="float32"))
    network = load_network(out)
    kinds = {spec.dtype for spec in (*network.config.inputs, *network.config.outputs)}
    assert kinds == {"float32"} == {str(value.dtype)[6:] for value in network.module.parameters()}
    scope: dict[str, Any] = {}
    exec(HALVES, scope)
    (x,) = network.inputs()
    with torch.no_grad():
        expected = scope["made"](getattr(torch, name)).float()(x)
        torch.testing.assert_close(network(x)[0], expected)


def test_an_onnx_file_of_16_bits_becomes_float32_if_asked(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Cast", ["h"], ["c"], to=TensorProto.FLOAT16),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["batch", size]) for name, size in (("x", 8), ("y", 4))
    )
    graph = helper.make_graph(nodes, "half", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, tmp_path / "half.onnx")
    plain = load_network(import_graph(str(tmp_path / "half.onnx"), tmp_path / "plain"))
    assert plain.config.inputs[0].dtype == "float16"
    network = load_network(import_graph(str(tmp_path / "half.onnx"), tmp_path / "wide", graph_options(dtype="float32")))
    assert [spec.dtype for spec in (*network.config.inputs, *network.config.outputs)] == ["float32", "float32"]
    (given,) = network.inputs()
    with torch.no_grad():
        torch.testing.assert_close(network(given)[0], (given @ torch.from_numpy(weight).float()).relu())


def test_a_module_that_does_not_run_on_an_example_of_another_type_says_so(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(HALVES)
    with pytest.raises(InputError, match=r"does not run on its example: .*its weights are bfloat16.*--dtype float32"):
        import_graph(f"{tmp_path}/nets.py:bfloat16", tmp_path / "out", graph_options(inputs=["input:2x8"]))
