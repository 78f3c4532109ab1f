"""`penjing import` of graphs: files, functions, weights, labels, images; what is wrong is named, and nothing stays."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from penjing.core.checkpoint.graph import load_network
from penjing.core.checkpoint.graph_look import look, show
from penjing.core.errors import ConfigError, InputError, PenjingError, SetupError
from penjing.core.graph.network import operator_name
from penjing.core.imports import torch_zoo
from penjing.core.imports.graph import graph_options, import_graph
from penjing.core.manifest import read_manifest
from penjing.core.onnx_reader.module import OPERATORS
from tests.core.graph.networks import Residual

SOURCE = """
import torch
from tests.core.graph.networks import Residual

def build():
    torch.manual_seed(0)
    return Residual(), torch.randn(1, 3, 16, 16)

def bare():
    return Residual()

def broken():
    raise RuntimeError("no such luck")

def number():
    return 3

def grey():
    return torch.nn.Conv2d(1, 4, 3), torch.randn(2, 1, 16, 16)

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))

def tied():
    return Tied(), torch.arange(8).view(2, 4)

def counted():
    return Residual(), 3
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(SOURCE)
    return str(tmp_path / "models.py")


def _onnx(path: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    weight = numpy_helper.from_array(torch.randn(3, 4).numpy(), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Softmax", ["h"], ["y"])],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, **changes)
    return path


def test_a_function_comes_in_with_weights_labels_and_pixels(models: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    module = Residual().eval()
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in module.state_dict().items()}}, tmp_path / "w.pth"
    )
    (tmp_path / "labels.txt").write_text("\n".join(f"class {index}" for index in range(10)))
    options = graph_options(
        weights=tmp_path / "w.pth", labels=tmp_path / "labels.txt", mean="0.5,0.5,0.5", std="0.2,0.2,0.2",
        fit="cover", resize="18x20", filter="bicubic"
    )  # fmt: skip
    out = import_graph(f"{models}:build", tmp_path / "out", options)
    network = load_network(out)
    assert network.config.meaning == "classes"
    assert network.config.labels[9] == "class 9"
    assert network.config.pixels is not None
    pixels = network.config.pixels
    assert (pixels.height, pixels.fit, pixels.resize, pixels.filter) == (16, "cover", (18, 20), "bicubic")
    images = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(network(images)[0], module(images))
    parity = read_manifest(out).created_by["parity"]
    assert parity["distance"] <= parity["bound"]


def test_an_onnx_file_comes_in_once_and_is_shown(tmp_path: Path) -> None:
    path = _onnx(tmp_path / "a.onnx")
    out = import_graph(str(path), tmp_path / "out")
    before = (out / "penjing.json").stat().st_mtime_ns
    import_graph(str(path), out)
    assert (out / "penjing.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="already exists"):
        import_graph(str(path), out, graph_options(meaning="embedding"))
    _, shown = look(out, tmp_path / "graph.svg")
    assert shown["macs"] == 12
    assert shown["bytes"] == 48
    assert (tmp_path / "graph.svg").read_text().count("<rect") == 1 + 3
    look(out, tmp_path / "graph.json")
    assert json.loads((tmp_path / "graph.json").read_text())["by_operator"]["linear"]["macs"] == 12
    with pytest.raises(ConfigError, match=r"\.txt"):
        look(out, tmp_path / "graph.png")


def test_a_difference_that_the_user_accepts_is_recorded_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(_onnx(tmp_path / "a.onnx"))
    monkeypatch.setitem(OPERATORS, "Softmax", lambda call: torch.softmax(call.tensor(0), -1) * 1.001)
    with pytest.raises(InputError, match=r"--tolerance 1\.1e-03"):
        import_graph(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = import_graph(path, tmp_path / "out", graph_options(tolerance=2e-3))
    made = read_manifest(out).created_by
    assert made["parity"]["tolerance"] == made["options"]["tolerance"] == 2e-3
    assert made["parity"]["bound"] == 1e-5
    assert show(out, tmp_path / "graph.txt")[1]["parity"]["tolerance"] == 2e-3
    assert "accepted by --tolerance 0.002" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="above 1e-05, at most 1"):
        graph_options(tolerance=1.5)


def test_a_module_that_keeps_something_from_call_to_call_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(
        "import torch\n\nclass Counting(torch.nn.Module):\n    calls = 0\n\n    def forward(self, x):\n"
        "        self.calls += 1\n        return x + self.calls\n\n"
        "def build():\n    return Counting(), torch.ones(2, 3)\n"
    )
    with pytest.raises(InputError, match="keep something from call to call"):
        import_graph(f"{tmp_path / 'models.py'}:build", tmp_path / "out")


def test_weights_beside_the_file_are_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = _onnx(tmp_path / "in" / "a.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    network = load_network(import_graph(str(path), tmp_path / "out"))
    assert [operator_name(node) for node in network.module.graph.nodes if operator_name(node)] == ["linear", "softmax"]
    (tmp_path / "in" / "w.bin").write_bytes(b"1234")
    with pytest.raises(InputError, match="ends before w"):
        import_graph(str(path), tmp_path / "other")
    (tmp_path / "in" / "w.bin").unlink()
    with pytest.raises(InputError, match=r"w\.bin with w is missing"):
        import_graph(str(path), tmp_path / "other")
    model = onnx.load(path, load_external_data=False)
    (tmp_path / "secret.bin").write_bytes(b"0" * 100)
    model.graph.initializer[0].external_data[0].value = "../secret.bin"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match="outside the folder"):
        import_graph(str(path), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_other_weights_beside_the_same_file_are_another_network(tmp_path: Path) -> None:
    path = _onnx(tmp_path / "a.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    out = import_graph(str(path), tmp_path / "out")
    assert import_graph(str(path), out) == out
    weights = tmp_path / "w.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(InputError, match="already exists; replace it with --force"):
        import_graph(str(path), out)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("broken", {}, "raised RuntimeError, line 13: no such luck"),
        ("number", {}, "returned a int"),
        ("missing", {}, "no function 'missing'"),
        ("bare", {}, "--input"),
        ("bare", {"inputs": ["pictures:1x3x16x16"]}, "does not take these inputs"),
        ("bare", {"inputs": ["images:2x5x16x16"]}, "does not run on its example"),
        ("build", {"weights": "few.safetensors"}, "are missing"),
        ("build", {"weights": "wide.safetensors"}, r"last\.bias has the shape \[11\]"),
        ("build", {"weights": "pickle.pth"}, "objects besides tensors"),
        ("build", {"weights": "torn.pth"}, "no file of weights"),
        ("build", {"weights": "none.pth"}, "cannot read"),
        ("build", {"labels": "two.txt"}, "2 labels came, and the output output has 10 classes"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, options: dict[str, object], said: str, models: str, tmp_path: Path
) -> None:
    state = Residual().state_dict()
    save_file({"last.bias": torch.zeros(10)}, tmp_path / "few.safetensors")
    save_file({**state, "last.bias": torch.zeros(11)}, tmp_path / "wide.safetensors")
    torch.save(Residual(), tmp_path / "pickle.pth")
    torch.save(state, tmp_path / "torn.pth")
    (tmp_path / "torn.pth").write_bytes((tmp_path / "torn.pth").read_bytes()[:3000])
    (tmp_path / "two.txt").write_text("a\nb\n")
    given = {key: tmp_path / value if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(InputError, match=said):
        import_graph(f"{models}:{name}", tmp_path / "out", graph_options(**given))  # type: ignore[arg-type]
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"size": "64x64"}, r"images of 64x64 and 3 channels \(RGB, NCHW\) are not what the input"),
        ({"order": "L"}, r"images of 16x16 and 1 channel \(L, NCHW\) are not what"),
        ({"mean": "120,110,100"}, "--mean 120: pixels are divided by 255, so write 0 to 1, or say --scale"),
        ({"layout": "NHWC"}, r"correct --size, --order or --layout"),
        ({"dynamic": ["images:0=batch,7=width"]}, "the axis images:7=width: images has 4 axes"),
        ({"dynamic": ["y:0=batch"]}, "Residual has no input 'y'; its inputs are images"),
    ],
)
def test_images_and_axes_that_the_network_does_not_take_are_refused(
    models: str, tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(PenjingError, match=message):
        import_graph(f"{models}:build", tmp_path / "out", graph_options(**said))
    assert not (tmp_path / "out").exists()


def test_a_network_of_one_channel_takes_grey_images(models: str, tmp_path: Path) -> None:
    out = import_graph(f"{models}:grey", tmp_path / "out", graph_options(mean="0.5", std="0.25"))
    pixels = load_network(out).config.pixels
    assert pixels is not None
    assert (pixels.order, pixels.mean, pixels.std) == ("L", (0.5,), (0.25,))


def test_a_tied_weight_that_a_file_holds_once_is_not_missing(models: str, tmp_path: Path) -> None:
    weight = torch.randn(11, 6)
    save_file({"embedding.weight": weight}, tmp_path / "w.safetensors")
    out = import_graph(f"{models}:tied", tmp_path / "out", graph_options(weights=tmp_path / "w.safetensors"))
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(load_network(out)(ids)[0], weight[ids] @ weight.t())


@pytest.mark.parametrize("suffix", [".txt", ".json"])
def test_a_byte_order_mark_is_no_part_of_a_label(models: str, tmp_path: Path, suffix: str) -> None:
    names = [f"class {index}" for index in range(10)]
    path = tmp_path / f"labels{suffix}"
    path.write_text("\n".join(names) if suffix == ".txt" else json.dumps(names), encoding="utf-8-sig")
    out = import_graph(f"{models}:build", tmp_path / "out", graph_options(labels=path))
    assert load_network(out).config.labels == tuple(names)


def test_an_example_that_is_no_inputs_is_named(models: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="returned a int as its example; return"):
        import_graph(f"{models}:counted", tmp_path / "out")


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(SetupError, match="pip install timm"):
        import_graph("timm/resnet18", tmp_path / "out")
    with pytest.raises(InputError, match="no network 'nonsense'"):
        import_graph("transformers/nonsense", tmp_path / "out")


def test_a_folder_that_is_there_is_refused_before_any_work(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "penjing.json").write_text("{}")
    monkeypatch.setattr("penjing.core.imports.graph.from_function", lambda source: pytest.fail("it was built"))
    with pytest.raises(InputError, match="already exists; replace it with --force"):
        import_graph(f"{models}:build", tmp_path / "out")


def test_a_package_that_does_not_fit_and_a_name_that_is_nearly_right_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "timm.py").write_text(
        "def create_model(name, pretrained): raise RuntimeError(f'Unknown model ({name})')\n"
        "def list_models(): return ['mobilenetv2_035', 'mobilenetv3_small_050', 'mobilenetv3_small_075', 'vit']\n"
    )
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("timm", "torchvision"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(InputError, match="did you mean 'mobilenetv3_small_050' or 'mobilenetv3_small_075'"):
        import_graph("timm/mobilenetv3_small", tmp_path / "out")
    with pytest.raises(SetupError, match=f"beside torch {re.escape(torch.__version__)} .*built for this torch"):
        import_graph("torchvision/resnet18", tmp_path / "out")


def test_images_are_fitted_as_the_packages_evaluate(tmp_path: Path) -> None:
    """The names and numbers are timm's (`mobilenetv3_small_100`, `vit_…`) and torchvision's (`resnet18`, `ssd300`)."""
    said = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    timm = torch_zoo._timm_pixels(
        {**said, "crop_pct": 0.875, "crop_mode": "center", "interpolation": "bicubic"}, 224, 224
    )
    assert (timm.fit, timm.resize, timm.filter) == ("cover", (256, 256), "bicubic")
    squashed = torch_zoo._timm_pixels({**said, "crop_pct": 1.0, "crop_mode": "squash"}, 256, 256)
    assert (squashed.fit, squashed.resize, squashed.filter) == ("stretch", (256, 256), "bilinear")
    padded = torch_zoo._timm_pixels({**said, "crop_pct": 0.95, "crop_mode": "border"}, 224, 224)
    assert (padded.fit, padded.resize) == ("border", (235, 235))
    filter_ = SimpleNamespace(value="bilinear")
    preset = SimpleNamespace(crop_size=[224], resize_size=[256], interpolation=filter_, **said)
    cut = torch_zoo._torchvision_pixels(preset, 224, 224)
    assert (cut.height, cut.fit, cut.resize, cut.filter) == (224, "cover", (256, 256), "bilinear")
    whole = torch_zoo._torchvision_pixels(SimpleNamespace(resize_size=[520], **said), 520, 520)
    assert (whole.fit, whole.resize) == ("stretch", None)


@pytest.mark.parametrize(
    "said",
    [{"inputs": ["x"]}, {"inputs": ["x:0x2"]}, {"inputs": ["x:2:why"]}, {"dynamic": ["x:a=b"]}, {"dynamic": ["0=b"]},
     {"fixed": ["sr=high"]}, {"size": "big"}, {"resize": "1x2x3"}, {"mean": "a,b"}, {"meaning": "boxes"}],
)  # fmt: skip
def test_options_are_read_strictly(said: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--"):
        graph_options(**said)  # type: ignore[arg-type]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_one_error_or_a_network(tmp_path: Path, data: st.DataObject) -> None:
    path = _onnx(tmp_path / "a.onnx")
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        generator = random.Random(data.draw(st.integers(0, 10**6)))
        for _ in range(generator.randint(1, 4)):
            content[generator.randrange(len(content))] = generator.randrange(256)
    path.write_bytes(bytes(content))
    out = tmp_path / "out"
    try:
        import_graph(str(path), out, force=True)
    except PenjingError:
        assert not list(tmp_path.glob(".out*"))
