"""Changes of a classifier: what leaves each layer, norms estimated anew, and rounding as the step quantize rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from penjing.compress.families.base import family_at
from penjing.compress.families.classifier import refresh_batch_norms
from penjing.compress.graph.own import classifier_network
from penjing.compress.prune.subject import shapes_of
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.quantizers.graph import calibrated
from penjing.compress.recipe import Recipe, load_recipe
from penjing.compress.samples import data
from penjing.compress.samples.data import DataSettings
from penjing.compress.search.recipe import Choices
from penjing.compress.search.space import Weighted
from penjing.compress.search.trial import Trials
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.models.resnet_config import ResNetConfig, cifar_resnet
from penjing.core.progress import Silent
from tests.compress.classifiers import made_up_images, write_classifier

SMALL: ResNetConfig = cifar_resnet(8, width=8, in_channels=1)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(data, "load_fashion", made_up_images)
    folder = write_classifier(tmp_path / "dense", model=SMALL)
    steps = [{"kind": "prune", "ratio": 0.5, "round_to": 1}, {"kind": "quantize", "keep": ["stem"]}]
    small = {"images": 128, "batch_images": 32}
    return load_recipe({"model": str(folder), "output": str(tmp_path / "out"), "data": small, "steps": steps})


def test_a_combination_is_judged_as_what_is_made_of_it(recipe: Recipe, tmp_path: Path) -> None:
    trials = Trials(recipe, Choices(widths=(1.0, 0.5)), family_at(recipe.model), Silent())
    space = trials.space
    names = [each.name for each in space.variables if each.kind == "bits"]
    assert "stem" not in names  # the base keeps it floating
    assert names[0] == "blocks.0.layers.0"
    before = {name: tensor.clone() for name, tensor in trials.model.state_dict().items()}

    # All that is pruned: costs of the real network, layer by layer.
    narrow = space.uniform(0.5, 32)
    ratios = space.ratios(narrow)
    assert len(ratios) == 6
    (tmp_path / "pruned").mkdir()
    pruner = family_at(recipe.model).need("pruner", "pruned")
    step = Prune(ratios=ratios, round_to=1)
    record = prune_checkpoint(recipe.model, tmp_path / "pruned", step, pruner, None, Silent())
    assert record["macs"]["after"] == space.costs("macs", np.array([narrow]))[0]
    left = shapes_of(load_classifier(tmp_path / "pruned")[0])
    weights = [np.prod(shape) for name, shape in left.items() if name.endswith(("conv.weight", "fc.weight"))]
    assert 4 * sum(weights) == space.costs("bytes", np.array([narrow]))[0]

    # What it answers, with norms estimated on the batches that are not judged.
    model, config = load_classifier(tmp_path / "pruned")
    whole = load_classifier(recipe.model)[0]
    batches = [images for (images,) in data.image_samples(recipe.model, recipe.data, Silent()).inputs()]
    shown = tuple((images,) for images in batches[::2])
    assert all(inputs[0].equal(images) for inputs, images in zip(trials.seen.inputs(), batches[::2], strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.ImageData, "inputs", lambda _: iter(shown))
        refresh_batch_norms(tmp_path / "pruned", DataSettings(images=64), Silent())
    model, config = load_classifier(tmp_path / "pruned")
    assert trials.divergence(narrow) == pytest.approx(divergence(model, whole, batches[1::2]), rel=1e-4)

    # Rounded, with some layers floating.
    half = list(space.start)
    for place, each in enumerate(space.variables):
        half[place] = int(each.kind == "bits" and each.name != "fc")
    settings = GraphSettings(keep=("stem", "fc"))
    rounded = calibrated(classifier_network(whole, config.image_size), settings, trials.seen)
    expected = divergence(lambda x: rounded(x)[0], load_classifier(recipe.model)[0], batches[1::2])
    assert trials.divergence(half) == pytest.approx(expected, rel=1e-3)
    assert trials.divergence(space.start) == 0.0
    after = trials.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def divergence(model: object, whole: object, batches: list[torch.Tensor]) -> float:
    total = 0.0
    for images in batches:
        before, after = (each(images).double().log_softmax(1) for each in (whole, model))  # type: ignore[operator]
        total += float(F.kl_div(after, before, reduction="sum", log_target=True))
    return total / sum(map(len, batches))


def test_costs_count_bits_and_both_sides_of_a_layer(recipe: Recipe) -> None:
    space = Trials(recipe, Choices(), family_at(recipe.model), Silent()).space
    start, stored = (space.costs("macs", np.array([each])) for each in (space.start, space.uniform(1.0, 8)))
    layers = [layer for layer in space.layers if isinstance(layer, Weighted)]
    (stem,) = (layer for layer in layers if layer.name == "stem")
    assert stored == (start - stem.macs) / 4 + stem.macs
    (inner,) = (layer for layer in layers if layer.name == "blocks.0.layers.1")
    assert len(inner.scope) == 3  # what it reads, what it makes, its bits
    assert {space.variables[each].kind for each in inner.scope} == {"width", "bits"}
    quarter = list(space.start)
    for each in (*inner.rows, *inner.columns):
        quarter[each] = space.variables[each].nearest(0.5)
    (table,) = (each for each, layer in zip(space.tables("bytes"), space.layers, strict=True) if layer is inner)
    assert table.cost[tuple(quarter[each] for each in inner.scope)] == 4 * inner.weights / 4
