from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.graph import EXAMPLE, WEIGHTS, graph_skeleton, load_network, save_graph
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.core.graph.network import tensors_of
from penjing.core.graph.store import dump_graph, load_graph
from penjing.core.graph.trace import from_torch
from penjing.core.manifest import write_manifest
from tests.core.graph.networks import Attention, Residual

_NETWORK = from_torch(Residual().eval(), (torch.randn(2, 3, 16, 16),))
_TENSORS = tensors_of(_NETWORK.module)
_TEXT = dump_graph(_NETWORK.module.graph)


def test_a_checkpoint_gives_the_same_network_back(tmp_path: Path) -> None:
    axes = {"tokens": {0: "batch", 1: "length"}}
    for name, network in (
        ("residual", _NETWORK),
        ("attention", from_torch(Attention().eval(), (torch.randint(50, (2, 7)),), dynamic=axes)),
    ):
        (tmp_path / name).mkdir()
        save_graph(tmp_path / name, network, {"command": "test"})
        loaded = load_network(tmp_path / name)
        assert loaded.config == network.config
        assert loaded.text() == network.text()
        shown = load_file(tmp_path / name / EXAMPLE)
        answer = shown[f"output.{network.config.outputs[0].name}"]
        torch.testing.assert_close(loaded(*loaded.inputs())[0], answer, rtol=0, atol=0)
        trained = [name for name, _ in loaded.module.named_parameters()]
        assert sorted(trained) == sorted(name for name, _ in network.module.named_parameters())


def _load(text: str) -> None:
    load_graph(text, _TENSORS, "graph.json", frozenset())


@pytest.mark.parametrize(
    "target", ["aten.from_file.default", "aten.add_.Tensor", "os.system", "aten.relu", "operator.attrgetter", None, 3]
)
def test_only_known_operators_are_called(target: object) -> None:
    values = json.loads(_TEXT)
    next(node for node in values["nodes"] if node["op"] == "call_function")["target"] = target
    with pytest.raises(InputError, match="not an operator that penjing knows"):
        _load(json.dumps(values))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_text_is_refused_or_still_a_graph(data: st.DataObject) -> None:
    values = json.loads(_TEXT)
    node = data.draw(st.sampled_from(values["nodes"]))
    key = data.draw(st.sampled_from(["name", "op", "target", "args", "kwargs"]))
    damage = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.lists(st.none(), max_size=2))
    node[key] = data.draw(st.one_of(damage, st.dictionaries(st.text(max_size=4), damage, max_size=2)))
    with contextlib.suppress(InputError):
        load_graph(json.dumps(values), _TENSORS, "graph.json", frozenset()).graph.lint()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2, "nodes": []}', _TEXT[:500], "[" * 100_000])
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"graph\.json"):
        _load(text)


def test_a_missing_weight_is_named() -> None:
    with pytest.raises(InputError, match=r"'first\.0\.weight' is missing"):
        load_graph(_TEXT, {}, "graph.json", frozenset())


def test_the_name_of_an_argument_is_never_run_as_code() -> None:
    values = json.loads(_TEXT)
    node = next(node for node in values["nodes"] if node["op"] == "call_function")
    node["kwargs"] = {"x=__import__('os').abort()": None}
    with pytest.raises(InputError, match="has no argument"):
        _load(json.dumps(values))


def test_an_input_may_have_the_name_of_a_function_of_python(tmp_path: Path) -> None:
    """`nn.Sequential.forward(input)`: the node is called input_1."""
    network = from_torch(torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), (torch.randn(2, 4),))
    save_graph(tmp_path, network, {})
    loaded = load_network(tmp_path)
    assert [spec.name for spec in loaded.config.inputs] == ["input"]
    assert torch.equal(loaded(*network.inputs())[0], network(*network.inputs())[0])


class Dashed(torch.nn.Module):
    """Its layer has a name as those of torchvision's RegNet: no identifier."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("block1-0", torch.nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("block1-0")(x)


def test_weights_keep_names_that_are_no_identifiers(tmp_path: Path) -> None:
    network = from_torch(Dashed().eval(), (torch.randn(2, 3),))
    save_graph(tmp_path, network, {"command": "test"})
    loaded = load_network(tmp_path)
    torch.testing.assert_close(loaded(*loaded.inputs())[0], network(*network.inputs())[0])
    assert "block1-0.weight" in tensors_of(loaded.module)


@pytest.mark.parametrize("said", ["3", "null", '[["a"]]', '{"a": 1}', "{"])
def test_parameters_that_are_no_list_of_names(said: str, tmp_path: Path) -> None:
    save_graph(tmp_path, _NETWORK, {"command": "test"})
    save_file({name: value.detach() for name, value in _TENSORS.items()}, tmp_path / WEIGHTS, {"parameters": said})
    write_manifest(tmp_path, "checkpoint", {"command": "test"})
    for load in (load_network, graph_skeleton):
        with pytest.raises(InputError, match="cannot be loaded"):
            load(tmp_path)


def test_a_family_that_is_no_name(tmp_path: Path) -> None:
    for said in ({"graph": 1}, ["graph"], 3, None):
        (tmp_path / "config.json").write_text(json.dumps({"penjing_family": said}))
        with pytest.raises(InputError, match="is not installed"):
            family_of(tmp_path)
