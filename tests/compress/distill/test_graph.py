"""Graphs learn from classes and from each other, in a compression run."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.distill.graph import (
    FromTeacher,
    cosine_distances,
    samples,
    squared_errors,
    taught_by_graph,
)
from penjing.compress.distill.objective import DistillWeights
from penjing.compress.run import run_recipe
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.graph import graph_samples
from penjing.compress.steps.train import Distill
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import Pixels
from penjing.core.graph.network import tensors_of
from penjing.core.progress import Silent
from penjing.train.families.graph import GraphTraining, rebuilt
from penjing.train.objective.outputs import REAL, Classes, inputs_of
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import RunRecipe
from tests.compress.conftest import Notes
from tests.compress.graphs import graph_folder
from tests.core.graph.networks import Residual
from tests.train.sources.photos import folder_of

PIXELS = Pixels(height=16, width=16, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
FAST: dict[str, Any] = {
    "batch_size": 8, "optimizer": {"name": "sgd", "momentum": 0.9}, "learning_rate": {"kind": "constant", "peak": 0.05},
}  # fmt: skip


def network(path: Path, seed: int = 0) -> Path:
    model = Residual()
    model.last = torch.nn.Linear(16, 2)
    return graph_folder(path, model, torch.randn(4, 3, 16, 16), seed=seed, meaning="classes", pixels=PIXELS)


@pytest.fixture
def photos(tmp_path: Path) -> str:
    return str(folder_of(tmp_path / "photos", {"cat": 20, "dog": 20}))


def run(tmp_path: Path, photos: str, *steps: dict[str, Any], **data: Any) -> Path:
    recipe = {
        "model": str(network(tmp_path / "net")),
        "output": str(tmp_path / "out"),
        "data": {"images": photos, "held_out": 0.3} | data,
        "evaluate": {"resamples": 100},
        "guard": {"accuracy_points": 100, "similarity_loss": 2},
        "measure": {"rounds": 0},
        "steps": [FAST | step for step in steps],
    }
    return run_recipe(recipe)


@pytest.mark.parametrize("mix", [0.0, 0.4])
def test_a_graph_is_fine_tuned_on_photos(tmp_path: Path, photos: str, mix: float) -> None:
    out = run(tmp_path, photos, {"kind": "finetune", "steps": 6, "flip": True, "pad": 1, "mix": mix})
    before, after = (tensors_of(load_network(folder).module) for folder in (tmp_path / "net", out))
    assert not torch.equal(before["last.weight"], after["last.weight"])
    assert not torch.equal(before["first.1.running_mean"], after["first.1.running_mean"])
    report = json.loads((out / "report.json").read_text())
    record = report["stages"][1]["record"]
    assert record["losses"]["last"]["loss"] < record["losses"]["first"]["loss"]
    assert record["data"] == [photos]
    assert report["stages"][1]["quality"]["name"] == "accuracy"


def test_samples_without_classes_are_not_mixed(tmp_path: Path, photos: str) -> None:
    with pytest.raises(ConfigError, match=r"mix = 0\.4 needs samples with classes"):
        run(tmp_path, photos, {"kind": "finetune", "steps": 2, "mix": 0.4}, labels=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("loss", ["auto", "mse", "cosine"])
def test_a_graph_learns_from_another_without_classes(tmp_path: Path, photos: str, loss: str) -> None:
    teacher = network(tmp_path / "teacher", seed=7)
    step = {"kind": "distill", "teacher": str(teacher), "steps": 12, "loss": loss}
    out = run(tmp_path, photos, step, labels=False)
    record = json.loads((out / "report.json").read_text())["stages"][1]["record"]
    assert record["losses"]["last"]["loss"] < record["losses"]["first"]["loss"]
    assert set(record["losses"]["last"]) == {"loss", {"auto": "divergence"}.get(loss, loss)}
    assert 0 <= record["evaluation"]["agreement"] <= 1


@pytest.mark.parametrize("given", [{}, {"batch_norms": "learn"}])
def test_batch_norms_keep_their_statistics_unless_they_shall_learn(
    tmp_path: Path, photos: str, given: dict[str, str]
) -> None:
    step = {"kind": "distill", "teacher": str(network(tmp_path / "teacher", seed=7)), "steps": 3} | given
    out = run(tmp_path, photos, step, labels=False)
    before, after = (tensors_of(load_network(folder).module) for folder in (tmp_path / "net", out))
    assert torch.equal(before["first.1.running_mean"], after["first.1.running_mean"]) is (not given)
    assert not torch.equal(before["first.1.weight"], after["first.1.weight"])


def test_features_and_a_loss_of_the_user(tmp_path: Path, photos: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def loss(ours, theirs, targets):\n    return (ours[0] - theirs[0]).abs().mean(1)\n")
    nodes = load_network(network(tmp_path / "shown")).module.graph.nodes
    node = next(each.name for each in nodes if each.op == "call_function" and "mean" in each.name)
    step = {
        "kind": "distill", "teacher": str(network(tmp_path / "teacher", seed=7)), "steps": 3, "loss": f"{mine}:loss",
        "features": [node], "weights": {"logits": 1.0, "hidden": 0.5, "cross_entropy": 0.1},
    }  # fmt: skip
    out = run(tmp_path, photos, step)
    losses = json.loads((out / "report.json").read_text())["stages"][1]["record"]["losses"]["last"]
    assert set(losses) == {"loss", "own", "cross_entropy", "hidden"}
    assert len(load_network(out).config.outputs) == 1


@pytest.mark.parametrize(
    ("step", "data", "said"),
    [
        ({"kind": "finetune", "steps": 1}, {"labels": False}, "no classes"),
        ({"kind": "finetune", "steps": 1, "sources": ["x"]}, {}, "no use for sources"),
        ({"kind": "distill", "steps": 1, "features": ["nothing"], "weights": {"hidden": 1.0}}, {}, "no node 'nothing'"),
        ({"kind": "distill", "steps": 1, "weights": {"hidden": 1.0}}, {}, "belong together"),
    ],
)
def test_what_a_graph_cannot_learn(
    tmp_path: Path, photos: str, step: dict[str, Any], data: dict[str, Any], said: str
) -> None:
    if step["kind"] == "distill":
        step = step | {"teacher": str(network(tmp_path / "teacher", seed=7))}
    with pytest.raises((ConfigError, InputError), match=said):
        run(tmp_path, photos, step, **data)
    assert not (tmp_path / "out").exists()


def test_training_needs_samples(tmp_path: Path, photos: str) -> None:
    recipe = {
        "model": str(network(tmp_path / "net")), "output": str(tmp_path / "out"),
        "steps": [{"kind": "finetune", "steps": 1}],
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"set data\.source"):
        run_recipe(recipe)


@pytest.mark.parametrize("loss", ["divergence", "mse"])
@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_the_objective_is_a_sum_over_real_samples(loss: str, hidden: float) -> None:
    teacher, student = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    rows = torch.randn(5, 3)

    class Tuple(torch.nn.Module):
        """An output, and a feature."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.inner(x)
            return y, 10 * y.relu()

    objective = FromTeacher(Tuple(teacher), None, loss, DistillWeights(hidden=hidden), 1.0, 1, scales=(0.5, 20.0))

    def total(x: torch.Tensor, real: list[bool]) -> float:
        batch = {"input.0": x, "targets": torch.full((len(x),), -100), REAL: torch.tensor(real)}
        assert objective.count(batch) == sum(real)
        return float(objective(Tuple(student), batch).total.detach())

    whole = total(rows, [True] * 5)
    filled = torch.cat([rows[3:], torch.zeros(1, 3)])
    assert total(rows[:3], [True] * 3) + total(filled, [True, True, False]) == pytest.approx(whole, rel=1e-5)
    assert isinstance(FromTeacher(teacher, Classes(0.1), "mse", DistillWeights(), 1.0, 1).evaluation(), Classes)


def test_distances_are_zero_for_equal_outputs() -> None:
    values = torch.randn(4, 3, 2)
    torch.testing.assert_close(squared_errors(values, values, 2.0), torch.zeros(4))
    torch.testing.assert_close(cosine_distances(values, 2 * values), torch.zeros(4), atol=1e-6, rtol=0)
    with pytest.raises(InputError, match="one shape"):
        squared_errors(values, values[:, :2], 2.0)
    for scale in (float("inf"), float("nan")):  # divided by infinity, nothing would be left to learn
        with pytest.raises(InputError, match="NaN or infinity"):
            squared_errors(values, values, scale)


def test_the_loss_of_a_step_is_the_same_in_any_micro_batches(tmp_path: Path, photos: str) -> None:
    teacher = network(tmp_path / "teacher", seed=7)
    step = {"kind": "distill", "teacher": str(teacher), "steps": 1, "loss": "mse", "batch_norms": "keep"}
    losses = list[float]()
    for micro_batch in (8, 2):
        out = run(tmp_path / str(micro_batch), photos, step | {"micro_batch": micro_batch}, labels=False)
        record = json.loads((out / "report.json").read_text())["stages"][1]["record"]
        losses.append(record["losses"]["first"]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_rebuilt_graph_has_its_own_tensors(tmp_path: Path) -> None:
    kept = load_network(network(tmp_path / "net"))
    model = rebuilt(kept)
    inputs = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(model.eval()(inputs)[0], kept(inputs)[0], rtol=0, atol=0)
    with torch.no_grad():
        model.get_parameter("last.weight").zero_()
    assert kept.module.get_parameter("last.weight").abs().sum() > 0


def test_mixtures_do_not_depend_on_micro_batches(tmp_path: Path, photos: str) -> None:
    """Samples were mixed with the one before them in the micro-batch, so that its size changed the loss."""
    folder, teacher = network(tmp_path / "net"), network(tmp_path / "teacher", seed=7)
    step = Distill.model_validate(FAST | {"kind": "distill", "steps": 1, "mix": 0.4})
    data = samples(folder, step, DataSettings.model_validate({"images": photos, "held_out": 0.3, "labels": False}))
    rest = {"output": tmp_path / "out", "run": tmp_path / "run", "steps": 1, "evaluation": {"every": 0}}
    recipe = RunRecipe.model_validate({"data": data.model_dump()} | rest)
    task = taught_by_graph(GraphTraining(folder, recipe, data, Silent()), recipe, folder, teacher, step)
    model = rebuilt(load_network(folder), ())

    def learnt(size: int) -> tuple[torch.Tensor, float]:
        batches = list(islice(task.stream(size, World()), 8 // size))
        with torch.no_grad():
            losses = [task.objective(model.train(), batch).total for batch in batches]
        return torch.cat([inputs_of(batch)[0] for batch in batches]), float(torch.stack(losses).sum())

    (mixed, loss), (parts, other) = learnt(8), learnt(2)
    assert torch.equal(mixed, parts)
    assert loss == pytest.approx(other, rel=1e-5)
    step = step.model_copy(update={"mix": 0.0})
    plain = taught_by_graph(GraphTraining(folder, recipe, data, Silent()), recipe, folder, teacher, step)
    images = inputs_of(next(iter(plain.stream(8, World()))))[0]
    assert not torch.equal(images, mixed)


def test_a_graph_learns_from_parts_and_mixtures(tmp_path: Path, photos: str) -> None:
    step = {"kind": "distill", "steps": 2, "scale": 0.5, "colour": 0.2, "mix": 0.4}
    out = run(tmp_path, photos, step | {"teacher": str(network(tmp_path / "teacher", seed=7))}, labels=False)
    record = json.loads((out / "report.json").read_text())["stages"][1]["record"]
    assert 0 < record["losses"]["last"]["loss"] < 10
    with pytest.raises(ConfigError, match="no class of its own"):
        run(tmp_path / "b", photos, step | {"weights": {"cross_entropy": 1.0}, "teacher": str(tmp_path / "teacher")})


def test_a_broken_image_is_named_once_a_run(tmp_path: Path, photos: str, notes: Notes) -> None:
    """Each pass of calibration, training and evaluation named it anew."""
    for image in Path(photos).rglob("*[05].*"):
        image.write_bytes(str(image).encode())
    folder = network(tmp_path / "net")
    settings = DataSettings.model_validate({"images": photos, "held_out": 0.3, "max_broken": 0.5})
    for _ in range(2):
        assert list(graph_samples(folder, settings, notes).inputs())
    named = [line for line in notes.lines if "is left out" in line]
    assert named
    assert len(set(named)) == len(named)
    other = Notes()  # of another run, which names it again
    assert list(graph_samples(folder, settings, other).inputs())
    assert set(other.lines) == set(named)
