"""Group-L1: the proximal step against its formula, and networks whose zero units leave without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from penjing.compress.families.base import Pruner, family_at
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune.surgery import remove
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.base import Context
from penjing.compress.steps.sparsify import Shrinkage, Sparsify, groups_of, zero_units
from penjing.compress.steps.train import Distill
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.errors import ConfigError
from penjing.core.models.resnet_config import cifar_resnet
from penjing.core.progress import Silent
from tests.compress.classifiers import write_classifier
from tests.compress.distill.conftest import STEPS, do


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 6), st.floats(0.0, 0.5), st.integers(0, 100))
def test_the_proximal_step_minimises_its_objective(hidden: int, threshold: float, seed: int) -> None:
    """‖v - w‖² / 2 + threshold × √size × ‖v‖ is smallest at the shrunk weights: by its subgradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    (group,) = dependency_graph(model, (torch.randn(2, 3),)).groups
    before = copy.deepcopy(model)
    shrinkage = Shrinkage(model, [group])
    shrinkage.shrink(threshold)

    def unit(network: nn.Module, index: int) -> torch.Tensor:
        first, last = network.get_submodule("0"), network.get_submodule("2")
        return torch.cat([first.weight[index], first.bias[index : index + 1], last.weight[:, index]]).detach()  # type: ignore[index]

    for index in range(hidden):
        v, w = unit(model, index), unit(before, index)
        weight = threshold * len(v) ** 0.5
        if v.any():
            torch.testing.assert_close(v - w + weight * v / v.norm(), torch.zeros_like(v), atol=1e-6, rtol=0)
        else:
            assert w.norm() <= weight + 1e-6
    assert torch.equal(model[2].bias, before[2].bias)  # type: ignore[union-attr]


@pytest.mark.usefixtures("small_images")
def test_zero_units_leave_a_classifier_as_it_computes(tmp_path: Path) -> None:
    source = write_classifier(tmp_path / "source", model=cifar_resnet(8, width=8, in_channels=1))
    step = Sparsify.model_validate(
        STEPS | {"steps": 40, "checkpoint_every": 100, "strength": 1.0, "learning_rate": {"peak": 5e-3}}
    )
    (tmp_path / "partial").mkdir()
    record = do(step, source, source, tmp_path / "partial", tmp_path / "work")
    assert 0.05 < record["zero_share"] < 0.95
    model, _ = load_classifier(tmp_path / "partial")
    pruner: Pruner = family_at(source).need("pruner", "pruned")
    groups = groups_of(pruner, tmp_path / "partial", step.parts, step.protect, Silent())
    zeros = zero_units(pruner, tmp_path / "partial", groups, Silent())
    assert [row["zero"] for row in record["groups"]] == [len(units) for units in zeros]
    selection = [
        (group, units[: len(group) - 1]) for group, units in zip(groups, zeros, strict=True) if units
    ]  # one stays where all are zero
    images = torch.randn(6, 1, 12, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(images)
        remove(model, selection)
        smaller = model(images)
    torch.testing.assert_close(smaller, whole, rtol=1e-5, atol=1e-5)
    before = sum(tensor.numel() for tensor in load_classifier(source)[0].parameters())
    assert sum(tensor.numel() for tensor in model.parameters()) < before


def test_a_decoder_loses_channels_of_its_mlps(
    tiny_checkpoint: Path, text_step: Callable[..., Distill], tmp_path: Path
) -> None:
    values = text_step().model_dump(exclude={"kind", "temperature", "weights", "label_smoothing"}, exclude_unset=True)
    step = Sparsify.model_validate(values | {"steps": 30, "strength": 2.0, "checkpoint_every": 100})
    (tmp_path / "partial").mkdir()
    record = do(step, tiny_checkpoint, tiny_checkpoint, tmp_path / "partial", tmp_path / "work")
    zero = [row["zero"] for row in record["groups"]]
    assert len(zero) == 2
    assert 0 < sum(zero) < 192
    weights = load_file(tmp_path / "partial/model.safetensors")
    for layer, count in enumerate(zero):
        gate, up, down = (weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert int(((gate == 0).all(1) & (up == 0).all(1) & (down == 0).all(0)).sum()) == count


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never exactly zero"):
        Sparsify(steps=1, strength=0.1, average=0.9)
    with pytest.raises(ValueError, match="greater than 0"):
        Sparsify(steps=1, strength=0.0)
    source = write_classifier(tmp_path / "source")
    context = Context(source, family_at(source), DataSettings(), Silent())
    with pytest.raises(ConfigError, match=r"parts=\['ffn'\]: decoders have parts, .* is an image classifier"):
        Sparsify(steps=1, strength=0.1, parts=("ffn",)).check(context)
