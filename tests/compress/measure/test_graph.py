"""Graphs are measured: their layers without storage, their outputs beside those of the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from penjing.compress.families.base import family
from penjing.compress.measure.cost import MeasureSettings, sizes_of, timed
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.measure.graph import rows_of, scores_of
from penjing.compress.measure.skeleton import layers_of, skeleton_of_graph
from penjing.compress.recipe import load_recipe
from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.graph import load_network, save_skeleton
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import Pixels
from penjing.core.progress import Silent
from tests.compress.graphs import graph_folder, write_graph
from tests.core.graph.networks import Attention, Residual
from tests.train.sources.photos import folder_of

FAMILY = family("graph")
SETTINGS = EvaluateSettings(resamples=100)


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    return graph_folder(tmp_path / "residual", Residual(), torch.randn(4, 3, 16, 16), meaning="classes")


def test_each_operator_with_weights_is_a_layer(residual: Path) -> None:
    skeleton = skeleton_of_graph(residual)
    layers = {layer.name: layer for layer in layers_of(skeleton.model, skeleton.example)}
    assert layers["second.0"].macs == 4 * 16 * 16 * 16 * 16 * 9
    assert layers["first.0"].shape == (16, 3, 3, 3)
    assert sum(layer.parameters for layer in layers.values()) == sum(p.numel() for p in Residual().parameters())
    sizes = sizes_of(residual, skeleton)
    assert sizes["widths"] == {"first.0": 16, "second.0": 16, "last": 10}
    assert sizes["size"]["macs"] == 16 * 16 * 9 * 16 * (3 + 16) + 160


def test_no_more_samples_are_counted_than_the_source_has(tmp_path: Path) -> None:
    source = str(folder_of(tmp_path / "photos", {"cat": 6, "dog": 5}))
    for name, passes in (("graph", 2), ("classifier", 1)):
        held_out = family(name).held_out
        assert held_out(EvaluateSettings(source=source)) == passes * 11
        assert held_out(EvaluateSettings(source=source, images=4)) == passes * 4
        assert 0 < held_out(EvaluateSettings(source=source, held_out=0.3)) < passes * 11
    assert family("classifier").held_out(EvaluateSettings()) == 10_000


def test_attention_without_weights_is_counted(tmp_path: Path) -> None:
    dynamic = {"tokens": {0: "batch", 1: "length"}}
    folder = graph_folder(tmp_path / "attention", Attention(), torch.randint(0, 50, (2, 7)), dynamic=dynamic)
    skeleton = skeleton_of_graph(folder)
    (attention,) = (
        layer for layer in layers_of(skeleton.model, skeleton.example) if layer.kind == "scaled_dot_product_attention"
    )
    assert attention.macs == 2 * 2 * 7 * 7 * 24


def test_an_artifact_has_the_skeleton_of_its_checkpoint(residual: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    shutil.copy(residual / "config.json", artifact)
    save_skeleton(artifact, load_network(residual))
    one, other = skeleton_of_graph(residual), skeleton_of_graph(artifact)
    assert layers_of(one.model, one.example) == layers_of(other.model, other.example)
    (artifact / "shapes.json").write_text('{"tensors": {"a": 3}}')
    with pytest.raises(InputError, match="import the network again"):
        skeleton_of_graph(artifact)


def test_a_graph_is_as_similar_to_itself_as_can_be(residual: Path, tmp_path: Path) -> None:
    same = FAMILY.evaluate(residual, residual, SETTINGS, Silent())
    assert (same.name, same.value, same.samples) == ("similarity", 1.0, 4)
    assert {part.name: part.value for part in same.parts} == {
        "class unchanged": 1.0,
        "squared error of outputs, relative": 0.0,
    }
    network = load_network(residual)
    with torch.no_grad():
        network.module.get_parameter("last.weight").neg_()
    other = FAMILY.evaluate(write_graph(tmp_path / "other", network), residual, SETTINGS, Silent())
    assert other.value < 0.9


def test_rows_of_zeros_are_alike_and_nan_is_refused() -> None:
    zeros = (torch.zeros(3, 4),)
    assert scores_of(zeros, zeros, None, True)["similarity"].tolist() == [1.0] * 3
    with pytest.raises(InputError, match="NaN"):
        rows_of([torch.full((3, 4), torch.nan)], 3)
    with pytest.raises(InputError, match="floating"):
        rows_of([torch.zeros(3, 4, dtype=torch.int64)], 3)


def test_graphs_are_timed_in_turns(residual: Path) -> None:
    settings = MeasureSettings(rounds=1, seconds=0, batches=(1, 6))
    rows = timed([residual, residual], FAMILY.calls, settings, Silent())
    assert [[row["case"] for row in each] for each in rows] == [["batch 1", "batch 6"]] * 2


def test_samples_are_the_example(residual: Path) -> None:
    samples = FAMILY.samples(residual, DataSettings(), Silent())
    ((images,),) = samples.inputs()
    assert images.shape == (4, 3, 16, 16)
    network = load_network(residual)
    (loss,) = samples.losses(network.module)
    loss.backward()
    assert network.module.get_parameter("first.0.weight").grad is not None
    assert FAMILY.hashes(residual)["graph.json"]


PIXELS = Pixels(height=16, width=16, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


@pytest.fixture
def of_photos(tmp_path: Path) -> Path:
    model = Residual()
    model.last = torch.nn.Linear(16, 2)
    return graph_folder(tmp_path / "photos-net", model, torch.randn(4, 3, 16, 16), meaning="classes", pixels=PIXELS)


def test_photos_are_calibrated_with_and_others_judged_on(of_photos: Path, tmp_path: Path) -> None:
    source = str(folder_of(tmp_path / "photos", {"cat": 14, "dog": 12}))
    data = DataSettings.model_validate({"images": source, "held_out": 0.3, "batch_images": 4})
    samples = FAMILY.samples(of_photos, data, Silent())
    batches = list(samples.inputs())
    assert {batch[0].shape for batch in batches} == {(4, 3, 16, 16)}
    losses = list(samples.losses(load_network(of_photos).module))
    assert len(losses) == len(batches)
    held = EvaluateSettings.model_validate({"source": source, "held_out": 0.3, "resamples": 100})
    quality = FAMILY.evaluate(of_photos, of_photos, held, Silent())
    assert quality.name == "accuracy"
    assert quality.samples + 4 * len(batches) <= 26
    assert {part.name for part in quality.parts} >= {"class unchanged", "cosine of outputs"}
    agreeing = FAMILY.evaluate(of_photos, of_photos, held.model_copy(update={"metric": "agreement"}), Silent())
    assert (agreeing.name, agreeing.value) == ("agreement", 1.0)
    assert quality.outcomes()[0].mean() == quality.value
    without = held.model_copy(update={"metric": "accuracy", "labels": False})
    with pytest.raises(ConfigError, match="needs classes"):
        FAMILY.evaluate(of_photos, of_photos, without, Silent())


def test_a_metric_of_the_user(of_photos: Path, tmp_path: Path) -> None:
    source = str(folder_of(tmp_path / "photos", {"cat": 6, "dog": 6}))
    mine = tmp_path / "metric.py"
    mine.write_text(
        "def score(outputs, targets):\n    return outputs[0][:, 0] * 0 + targets\ndef bad(o, t):\n    return 1\n"
    )
    settings = EvaluateSettings.model_validate({"source": source, "metric": f"{mine}:score", "resamples": 100})
    quality = FAMILY.evaluate(of_photos, of_photos, settings, Silent())
    assert (quality.name, quality.value, quality.samples) == ("score", 0.5, 12)
    with pytest.raises(InputError, match="one finite number for each"):
        FAMILY.evaluate(of_photos, of_photos, settings.model_copy(update={"metric": f"{mine}:bad"}), Silent())
    with pytest.raises(ValueError, match=r"FILE\.py:FUNCTION"):
        EvaluateSettings(metric="f1")


def test_evaluation_takes_what_the_data_hold_out() -> None:
    steps = [{"kind": "prune", "ratio": 0.5}]
    values = {"model": "m", "output": "o", "steps": steps, "data": {"images": "photos/", "held_out": 0.2}}
    recipe = load_recipe(values, family="graph")
    assert (recipe.evaluate.source, recipe.evaluate.held_out) == ("photos/", 0.2)
    own = load_recipe(values | {"evaluate": {"images": "other/"}}, family="graph")
    assert (own.evaluate.source, own.evaluate.held_out) == ("other/", 0.0)
