"""Graphs that learn while they are rounded: better than calibrated, exported as trained, resumed to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penjing.compress.distill.graph import TRAINING
from penjing.compress.distill.training import run_recipe_of
from penjing.compress.graph.place import products
from penjing.compress.graph.ready import ready
from penjing.compress.graph.stored import folded
from penjing.compress.graph.task import QuantizedTask, trained_network
from penjing.compress.quantizers.graph import GraphQuantize, calibrated, check, quantize
from penjing.compress.rounding.modes import activation_quantizers
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.graph import graph_samples
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from penjing.core.progress import Silent
from penjing.core.work import Places
from penjing.train.families.base import build_checkpoint_task
from penjing.train.families.graph import GraphTraining
from penjing.train.processes.stop import InterruptedRunError
from tests.compress.graph.networks import Block, Branches, randomised
from tests.compress.graphs import write_graph
from tests.compress.products import as_written

TRAIN: dict[str, Any] = {
    "steps": 60, "batch_size": 16, "device": "cpu", "checkpoint_every": 20, "evaluation_samples": 0, "loss": "mse",
    "learning_rate": {"kind": "cosine", "peak": 5e-4}, "parity_bound": 1.0,
}  # fmt: skip

PLAIN = {"smooth": False}  # which leaves so little that 60 updates win nothing


class Patches(nn.Module):
    """(batch, 3, 16, 16) → (batch, 6): a small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.block = Block()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 6)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.block(tokens)).mean(1))


@torch.no_grad()
def branches() -> nn.Module:
    """Four channels are 40 times as large as the others, which share their scale, and are read as much smaller."""
    torch.manual_seed(0)
    model = randomised(Branches())
    assert isinstance(model, Branches)
    model.stem[2] = nn.ReLU()
    wide, narrow = model.stem.get_parameter("1.weight"), model.left.get_parameter("0.weight")
    wide[:4] *= 40
    narrow[:4] /= 40
    model.right.weight[:, :4] /= 40
    return model


@torch.no_grad()
def patches() -> nn.Module:
    """One weight in each row is 60 times as large as the others, which share its scale, and reads as much less."""
    torch.manual_seed(0)
    model = randomised(Patches())
    assert isinstance(model, Patches)
    for norm, layer in ((model.block.first, model.block.qkv), (model.block.second, model.block.up)):
        layer.weight[:, 0] *= 60
        norm.weight[0] /= 60
    return model


def _images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def _data(folder: Path) -> DataSettings:
    path = folder / "data.safetensors"
    if not path.exists():
        save_file({"images": _images(512, 3)}, path)
    return DataSettings(source=str(path), held_out=0.1, images=128, batch_images=32)


def _source(folder: Path, model: nn.Module) -> Path:
    return write_graph(folder / "net", from_torch(model, (_images(2, 1),), meaning="classes"))


def _made(folder: Path, source: Path, name: str, **settings: Any) -> tuple[Places, dict[str, Any]]:
    places = Places(source, folder / name, folder / f"{name}.scratch")
    for each in (places.partial, places.scratch):
        each.mkdir(exist_ok=True)
    step = GraphQuantize.model_validate(TRAIN | settings)
    return places, quantize(places, step, _data(folder), source, Silent())


@torch.no_grad()
def _error(rounded: Network, floating: Network) -> float:
    """Squared error of the first output on images that nothing has seen, relative to how much it varies."""
    images = _images(256, 9)
    wanted = floating(images)[0]
    return float((rounded(images)[0] - wanted).square().mean() / wanted.var(0).mean())


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param(branches, {}, marks=pytest.mark.full),
        (branches, {"learn_weights": True}),
        pytest.param(patches, PLAIN, marks=pytest.mark.full),
        (patches, PLAIN | {"target": "tensorrt"}),
    ],
)
def test_training_makes_up_for_rounding_and_is_exported_as_it_is(
    tmp_path: Path, model: Callable[[], nn.Module], settings: dict[str, Any]
) -> None:
    source = _source(tmp_path, model())
    step, floating = GraphQuantize.model_validate(TRAIN | settings), load_network(source)
    with torch.enable_grad():
        places, record = _made(tmp_path, source, "int8", **settings)
    samples = graph_samples(source, _data(tmp_path), Silent())
    trained = trained_network(ready(floating, step, samples)[0], step, places.scratch / "quantized")
    before = _error(calibrated(floating, step, samples), floating)
    assert _error(trained, floating) < 0.6 * before
    assert record["quantized"]["training_steps"] == 60
    assert record["training"]["losses"]["last"]["mse"] < record["training"]["losses"]["first"]["mse"]

    file = onnx.load(places.partial / "model.onnx")
    kept = {each.name: onnx.numpy_helper.to_array(each) for each in file.graph.initializer}
    stored = {value.tobytes() for value in kept.values()}
    for product in (each for each in products(trained) if each.rounding is not None):
        found = folded(trained, product).weight.numpy()
        assert stored & {found.tobytes(), found.T.tobytes()}, product.name
    for quantizer in activation_quantizers(trained.module):
        assert quantizer.positive_scale().detach().numpy().tobytes() in stored, quantizer.name
    images = _images(16, 5)
    names = [[spec.name for spec in each] for each in (floating.config.inputs, floating.config.outputs)]
    session = as_written(places.partial / "model.onnx", *names)
    answer = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    wanted = trained(images)[0]
    assert (answer - wanted).abs().mean() < 0.01 * wanted.std()


def test_gradients_reach_every_weight_and_scale(tmp_path: Path) -> None:
    source, data = _source(tmp_path, branches()), _data(tmp_path)
    step = GraphQuantize.model_validate(TRAIN | {"learn_weights": True})
    run = run_recipe_of(source, step, TRAINING, data, tmp_path / "work")
    graph = build_checkpoint_task(source, run, Silent())
    assert isinstance(graph, GraphTraining)
    samples = graph_samples(source, data, Silent())
    task = QuantizedTask(graph, ready(graph.network, step, samples)[0], step, samples)
    model = task.build_model()
    task.initialize(model)
    model.train()
    model(_images(32, 2))[0].square().sum().backward()
    parameters = dict(model.named_parameters())
    assert {"stem.0.weight", "stem.0.bias", "last.weight"} <= parameters.keys()
    assert sum(name.endswith(".growth") for name in parameters) > 10
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()), name


def test_what_learns_answers_alike_in_training_and_in_evaluation(tmp_path: Path) -> None:
    """A batch norm that no convolution takes keeps its statistics, and nothing is dropped."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer, self.drop = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3), nn.Dropout(0.5)

        def forward(self, images: Tensor) -> Tensor:
            return self.drop(self.layer(self.norm(images))).mean((2, 3))

    source = _source(tmp_path, randomised(First()))
    places, _ = _made(tmp_path, source, "int8", steps=3)
    before, after = load_network(source), load_file(places.scratch / "quantized" / "model.safetensors")
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(after[name], before.module.get_buffer(name))
    assert not torch.equal(after["norm.weight"], before.module.get_parameter("norm.weight"))


def test_a_killed_training_goes_on_to_the_same_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _source(tmp_path, branches())
    whole, _ = _made(tmp_path, source, "whole", steps=6, checkpoint_every=2)

    def dying(self: Any, *given: Any) -> Any:
        def die(step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

        return (die,)

    with monkeypatch.context() as patch:
        patch.setattr(QuantizedTask, "after_update", dying)
        with pytest.raises((KeyboardInterrupt, InterruptedRunError)):
            _made(tmp_path, source, "killed", steps=6, checkpoint_every=2)
    calls: list[str] = []
    monkeypatch.setattr("penjing.compress.graph.task.prepare_graph", lambda *_: calls.append("calibrated again"))
    again, _ = _made(tmp_path, source, "killed", steps=6, checkpoint_every=2)
    assert not calls
    assert (whole.partial / "model.onnx").read_bytes() == (again.partial / "model.onnx").read_bytes()


def test_training_without_samples_or_with_settings_of_text_is_refused_first(tmp_path: Path) -> None:
    source = _source(tmp_path, branches())
    for given, data, said in (
        ({}, DataSettings(), r"set data\.source"),
        ({"sources": ["builtin:prose"]}, _data(tmp_path), "no use for sources"),
    ):
        with pytest.raises(ConfigError, match=said):
            check(source, GraphQuantize.model_validate(TRAIN | given), data)
    check(source, GraphQuantize(), DataSettings())
