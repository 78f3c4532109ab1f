"""`penjing import` of functions: which axes stay open, and what is said of an example that does not suit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

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
