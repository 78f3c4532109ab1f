"""Networks as ONNX files; ONNX Runtime is the oracle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, fx, nn

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.rounding.stored import quantized, widened
from penjing.core.errors import InputError
from penjing.core.graph.attention import open_attention
from penjing.core.graph.network import Network, propagate
from penjing.core.graph.trace import from_torch
from penjing.core.onnx_reader.read import from_onnx
from penjing.core.runtime.onnx_runtime import open_graph
from tests.core.graph.networks import Attention, Residual


def _run(path: Path, network: Network, *inputs: Tensor) -> list[Tensor]:
    names = [spec.name for spec in network.config.inputs], [spec.name for spec in network.config.outputs]
    session = open_graph(path, threads=1, names=names)
    found = session.run(None, dict(zip(names[0], (value.numpy() for value in inputs), strict=True)))
    return [torch.from_numpy(np.asarray(value)) for value in found]


def _operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(path)).graph.node)


@torch.no_grad()
def test_a_network_answers_in_onnx_runtime_at_any_batch_with_few_operators(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = from_torch(Residual().eval(), (torch.randn(2, 3, 16, 16),))
    export_network(network, tmp_path / "a.onnx", {"about": "it"})
    images = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(_run(tmp_path / "a.onnx", network, images)[0], network(images)[0])
    found = onnx.load(str(tmp_path / "a.onnx"))
    shapes = [[axis.dim_param or axis.dim_value for axis in i.type.tensor_type.shape.dim] for i in found.graph.output]
    assert shapes == [["batch", 10]]
    assert {each.key: each.value for each in found.metadata_props} == {"about": "it"}
    assert not any(node.metadata_props or node.doc_string for node in found.graph.node)
    assert _operators(tmp_path / "a.onnx") == {"Conv": 2, "Relu": 2, "Add": 1, "ReduceMean": 1, "Gemm": 1}
    export_network(network, tmp_path / "b.onnx", {"about": "it"})
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@torch.no_grad()
def test_sizes_that_differ_from_call_to_call_need_no_operators(tmp_path: Path) -> None:
    torch.manual_seed(0)
    axes = {"tokens": {0: "batch", 1: "length"}}
    network = from_torch(Attention().eval(), keyword={"tokens": torch.randint(50, (2, 7))}, dynamic=axes)
    export_network(network, tmp_path / "a.onnx", {})
    tokens = torch.randint(50, (3, 11))
    torch.testing.assert_close(_run(tmp_path / "a.onnx", network, tokens)[0], network(tokens)[0])
    found = _operators(tmp_path / "a.onnx")
    assert not found.keys() & {"Shape", "Concat", "Slice"}
    assert found["LayerNormalization"] == 1


class Ranked(nn.Module):
    """The largest and the smallest of many equal numbers, and where they are."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        largest, first = x.sort(dim=1, descending=True, stable=True)
        smallest, least = x.sort(stable=True)
        return largest[:, :7], first[:, :7], smallest.narrow(-1, 0, 9), least.narrow(-1, 0, 9)


@torch.no_grad()
def test_of_equal_values_the_first_comes_first(tmp_path: Path) -> None:
    x = torch.randint(3, (2, 50, 30)).float()
    network = from_torch(Ranked(), (x,), dynamic={"x": {0: "batch", 2: "length"}})
    export_network(network, tmp_path / "a.onnx", {})
    assert _operators(tmp_path / "a.onnx")["TopK"] == 2
    x = torch.randint(3, (3, 50, 40)).float()
    for ours, theirs in zip(network(x), _run(tmp_path / "a.onnx", network, x), strict=True):
        assert torch.equal(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("count", [3, 400])
def test_no_more_is_ranked_than_is_taken(tmp_path: Path, count: int) -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            values, places = x.sort(dim=-1, stable=True)
            return values[..., :count] + 1, places[..., :2] + 1

    x = torch.randint(3, (2, 50)).float()
    network = from_torch(First(), (x,))
    export_network(network, tmp_path / "a.onnx", {})
    for ours, theirs in zip(network(x), _run(tmp_path / "a.onnx", network, x), strict=True):
        assert torch.equal(ours, theirs)
    graph = onnx.load(str(tmp_path / "a.onnx")).graph
    held = {each.name: onnx.numpy_helper.to_array(each).tolist() for each in graph.initializer}
    assert [held[node.input[1]] for node in graph.node if node.op_type == "TopK"] == [[min(count, 50)]]


class Masked(nn.Module):
    """(batch, length, 8) and a mask of tokens → the same shape."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        seen = None if self.causal else mask[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(
            heads, heads, heads + mask.to(x.dtype).mean(), attn_mask=seen, is_causal=self.causal, scale=0.7
        )
        return mixed.transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_is_written_out_answers_the_same_also_where_nothing_is_seen(
    tmp_path: Path, causal: bool
) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False, True, False], [False] * 5])
    axes = {"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "length"}}
    network = from_torch(Masked(causal), (torch.randn(2, 5, 8), mask), dynamic=axes)
    opened = network.copy()
    propagate(opened)
    open_attention(opened.module.graph)
    opened.module.recompile()
    assert "scaled_dot_product_attention" not in opened.text()
    torch.testing.assert_close(opened(*network.inputs())[0], network(*network.inputs())[0])
    export_network(network, tmp_path / "a.onnx", {})
    torch.testing.assert_close(_run(tmp_path / "a.onnx", network, *network.inputs())[0], network(*network.inputs())[0])


def _held(value: Tensor) -> nn.Parameter:
    """What `fx` traces as an attribute."""
    return nn.Parameter(value, requires_grad=False)


class Stored(nn.Module):
    """A linear layer with an INT8 weight, whose input and output are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _held(torch.randint(-127, 128, (6, 4), dtype=torch.int8))
        self.scales = _held(torch.rand(6) / 50)
        self.scale = _held(torch.tensor(0.03))
        self.zero = _held(torch.tensor(101, dtype=torch.uint8))
        self.signed = _held(torch.tensor(0, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        x = quantized(x, self.scale, self.zero)
        y = nn.functional.linear(x, widened(self.weight, self.scales, None, 0))
        return quantized(y, self.scale, self.signed)


@torch.no_grad()
def test_rounding_is_written_as_pairs_around_stored_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stored()
    x = torch.randn(64, 4) * 3
    x[0] = torch.tensor([0.015, 0.045, -0.015, 1e9])  # ties go to even numbers; beyond the range is its end
    wanted = quantized(x, model.scale, model.zero)
    known = torch.fake_quantize_per_tensor_affine(x[1:], 0.03, 101, 0, 255)
    torch.testing.assert_close(wanted[1:], known, rtol=0, atol=1e-6)
    assert wanted[0].div(0.03).round().tolist() == [0.0, 2.0, 0.0, 154.0]
    network = from_torch(Plain(), (x,))
    stored = network.with_module(fx.symbolic_trace(model))
    export_network(stored, tmp_path / "a.onnx", {})
    assert _operators(tmp_path / "a.onnx") == {"QuantizeLinear": 2, "DequantizeLinear": 3, "Gemm": 1}
    kept = {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(str(tmp_path / "a.onnx")).graph.initializer
    }
    np.testing.assert_array_equal(kept["weight"], model.weight.numpy())
    got = _run(tmp_path / "a.onnx", stored, x)[0]
    torch.testing.assert_close(got, model(x), rtol=0, atol=0.0301)  # one step, where sums end on a tie
    assert float((got != model(x)).double().mean()) < 0.02


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1)[:, :6]


def test_what_has_no_form_in_onnx_is_named(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.histc(x, 4)

    network = from_torch(Odd(), (torch.randn(2, 3),), dynamic={})
    with pytest.raises(InputError, match=r"cannot be written as ONNX.*histc"):
        export_network(network, tmp_path / "a.onnx", {})
    assert not (tmp_path / "a.onnx").exists()


RULES = [("scales", "half_pixel"), ("sizes", "half_pixel"), ("sizes", "align_corners")]
RESIZED = [
    (mode, axes, *rule) for mode, axes in (("linear", 1), ("linear", 2), ("linear", 3), ("cubic", 2)) for rule in RULES
]
# Images by each rule; what has one axis or three, and curves, by one or two: the others are long variants.
BY_DEFAULT = [
    *RESIZED[3:6],
    ("linear", 1, *RULES[1]),
    ("linear", 3, *RULES[0]),
    ("cubic", 2, *RULES[0]),
    ("cubic", 2, *RULES[2]),
]


@pytest.mark.parametrize(
    ("mode", "axes", "by", "rule"),
    [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.full) for case in RESIZED],
)
def test_an_imported_file_is_resized_as_it_says(mode: str, axes: int, by: str, rule: str, tmp_path: Path) -> None:
    """Places followed from the sizes where a factor was given, which are cut off to integers."""
    given = np.array([1, 1, *[0.7] * axes], np.float32) if by == "scales" else np.array([2, 3, *[7] * axes])
    names = ["x", "", "given"] if by == "scales" else ["x", "", "", "given"]
    node = onnx.helper.make_node("Resize", names, ["y"], mode=mode, coordinate_transformation_mode=rule)
    batch, sizes = ("batch" if by == "scales" else 2), ["a", "b", "c"][:axes]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, 3, *sizes])
    y, values = onnx.helper.make_empty_tensor_value_info("y"), [onnx.numpy_helper.from_array(given, "given")]
    opset = [onnx.helper.make_opsetid("", 18)]
    graph = onnx.helper.make_graph([node], "resized", [x], [y], values)
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save(model, str(tmp_path / "a.onnx"))
    network = from_onnx(tmp_path / "a.onnx").network
    export_network(network, tmp_path / "b.onnx", {})
    image = torch.randn(2, 3, *[11, 30, 9][:axes])
    found, expected = (_run(tmp_path / name, network, image)[0] for name in ("b.onnx", "a.onnx"))
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
