"""Against Torch-Pruning, which finds the same couplings by another road: names of grad_fn."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch_pruning
from torch import nn

from penjing.compress.prune.graph import DependencyGraph, Group, dependency_graph
from penjing.compress.prune.surgery import mask, remove
from tests.compress.prune.architectures import ARCHITECTURES, LARGE

pytestmark = pytest.mark.xdist_group("known-architectures")  # one analysis of each for all
# Torch-Pruning does not follow key-value groups and shuffles, and ties a grouped convolution's inputs to its outputs.
BEYOND_TORCH_PRUNING = ("llama_gqa", "qwen3", "shufflenet", "resnext")
NAMES = [*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.full) for name in LARGE)]
COMPARED = [name for name in ARCHITECTURES if name not in BEYOND_TORCH_PRUNING]
NORMS_OVER_CHANNELS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class Known:
    """A network in evaluation mode, which tests leave as it is, its example and the groups found in it."""

    model: nn.Module
    example: tuple
    graph: DependencyGraph


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest) -> Known:
    """The architecture of that name: the tests of one follow each other, so that it is analysed once."""
    torch.manual_seed(sum(map(ord, request.param)))
    model, example = (ARCHITECTURES | LARGE)[request.param]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(module.running_var, 0.5, 2)  # pyright: ignore[reportArgumentType]
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
    model.eval()
    return Known(model, example, dependency_graph(model, example))


def output(model: nn.Module, example: tuple) -> torch.Tensor:
    with torch.no_grad():
        return model(*example)


def grads_of(model: nn.Module, example: tuple) -> list[nn.Parameter]:
    model.train()(*example).square().mean().backward()
    return list(model.parameters())


def over_a_norm(model: nn.Module, group: Group) -> bool:
    """Whether a norm takes its mean over the group's units: then a masked network is another function."""
    owners = [model.get_submodule(place.tensor.rpartition(".")[0]) for place in group.places]
    return any(type(owner).__name__ in NORMS_OVER_CHANNELS for owner in owners)


@pytest.mark.parametrize("known", NAMES, indirect=True)
def test_a_pruned_network_equals_the_masked_one_and_trains(known: Known) -> None:
    model, example, graph = known.model, known.example, known.graph
    assert graph.groups
    selection = [
        (group, list(range(0, len(group) - 1, 2))[: len(group) // 2])
        for group in graph.groups
        if not over_a_norm(model, group)
    ]
    pruned, masked = copy.deepcopy(model), copy.deepcopy(model)
    remove(pruned, selection)
    mask(masked, selection)
    before = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in pruned.parameters()) < before
    expected = output(masked, example)
    torch.testing.assert_close(output(pruned, example), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
    pruned.train()
    pruned(*example).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in pruned.parameters() if p.grad is not None)
    whole = copy.deepcopy(model)
    assert sum(p.grad is None for p in pruned.parameters()) == sum(p.grad is None for p in grads_of(whole, example))


@pytest.mark.parametrize("known", NAMES, indirect=True)
def test_each_group_alone_leaves_a_network_that_runs(known: Known) -> None:
    wanted = output(known.model, known.example).shape
    for group in known.graph.groups:
        pruned = copy.deepcopy(known.model)
        remove(pruned, [(group, [0])])
        assert output(pruned, known.example).shape == wanted


@pytest.mark.filterwarnings("ignore:Unwrapped parameters")
@pytest.mark.parametrize("known", [*COMPARED, pytest.param("resnet50", marks=pytest.mark.full)], indirect=True)
def test_groups_agree_with_torch_pruning(known: Known) -> None:
    model, example, graph = copy.deepcopy(known.model), known.example, known.graph
    theirs = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example[0])
    compared = 0
    for path, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.Linear) or getattr(module, "groups", 1) > 1:
            continue
        prune = (
            torch_pruning.prune_linear_out_channels
            if isinstance(module, nn.Linear)
            else torch_pruning.prune_conv_out_channels
        )
        ours = unit_of(graph, f"{path}.weight", 0, 1)
        if ours is None:
            continue
        indices = sorted(ours[f"{path}.weight", 0])
        group = theirs.get_pruning_group(module, prune, indices)
        assert ours == as_places(model, group), path
        compared += 1
    assert compared >= 2


def unit_of(graph: DependencyGraph, tensor: str, dim: int, index: int) -> dict[tuple[str, int], set[int]] | None:
    """What the unit takes of every weight of two dimensions or more."""
    for group in graph.groups:
        for unit in group.units:
            taken = {(place.tensor, place.dim): set(map(int, i)) for place, i in zip(group.places, unit, strict=True)}
            if index in taken.get((tensor, dim), ()):
                return {key: value for key, value in taken.items() if key[0].endswith("weight")}
    return None


def as_places(model: nn.Module, group: torch_pruning.Group) -> dict[tuple[str, int], set[int]]:
    names = {module: path for path, module in model.named_modules()}
    places: dict[tuple[str, int], set[int]] = {}
    for dependency, indices in group:
        module, function = dependency.target.module, dependency.handler.__name__
        if module not in names or not hasattr(module, "weight"):
            continue
        weight = module.weight
        dim = 1 if ("in_channels" in function and weight.dim() > 1) or isinstance(module, nn.Embedding) else 0
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            dim = 0
        if isinstance(module, nn.ConvTranspose2d):
            dim = 1 - dim
        places.setdefault((f"{names[module]}.weight", dim), set()).update(map(int, indices))
    return places
