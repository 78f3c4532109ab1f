"""How much a unit matters: one number for each unit of a group, larger is more important.

- `l1`, `l2`: magnitude of everything the unit takes (Li et al., https://arxiv.org/abs/1608.08710, over coupled slices).
- `taylor`: Σ weight × gradient, the change of a batch's loss in first order, as root of the mean square over batches
  (Molchanov et al., https://arxiv.org/abs/1906.10771); needs calibration losses.
- `activation`: mean |input| of the layers that read the unit, times the magnitude of their weights for it (after
  Minitron, https://arxiv.org/abs/2407.14679, and Wanda, https://arxiv.org/abs/2306.11695); needs calibration inputs.
- `random`: a baseline.

A family may bring `obs`, the error that a unit leaves behind once those that stay are corrected for it
(prune_decoder/obs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, fx, nn

from penjing.compress.prune.graph import Group, Place
from penjing.core.errors import InputError
from penjing.core.graph.network import operator_name

Kind = Literal["l1", "l2", "taylor", "activation", "obs", "random"]
Scores = list[np.ndarray]  # for each group, (units,) float64
Weights = Callable[[str], Tensor | None]  # a parameter by its name; None for a statistic


def magnitude(model: nn.Module | Weights, groups: Sequence[Group], power: Literal[1, 2] = 1) -> Scores:
    """L1 or L2 norm of the slices of weights and biases that each unit takes.

    Args:
        model: the network, or a function that reads its weights one at a time, so that it is never in memory whole.
    """

    def norm(place: Place) -> np.ndarray | None:
        parameter = _parameter(model, place)
        return None if parameter is None else _slices(parameter, place.dim, lambda w: w.abs() ** power)

    return _summed(groups, norm, power)


def taylor(model: nn.Module, groups: Sequence[Group], losses: Iterable[Tensor]) -> Scores:
    """First-order change of a loss when a unit goes: root of the mean square over the losses.

    Squares, because changes of either sign would cancel over the losses: near a minimum their sum is almost nothing.
    Only tensors of the groups get gradients, each gone once its products are summed: a network's worth of them would
    double the memory.

    Args:
        losses: of `model`, in evaluation mode, each with its graph; made one after the other.

    Raises:
        InputError: there are no losses, or one does not depend on a tensor of the groups.
    """
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    dims: dict[int, set[int]] = {id(parameter): set() for parameter in parameters.values()}
    for group in groups:
        for place in group.places:
            if (parameter := _parameter(model, place)) is not None:
                dims[id(parameter)].add(place.dim)
    products: dict[tuple[int, int], np.ndarray] = {}  # of one loss
    seen: set[int] = set()

    def take(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        seen.add(id(parameter))
        for dim in dims[id(parameter)]:
            products[id(parameter), dim] = _slices(parameter, dim, lambda w: w * gradient)
        parameter.grad = None

    def change(place: Place) -> np.ndarray | None:
        return products.get((id(_parameter(model, place)), place.dim))

    count, squares = 0, [np.zeros(len(group)) for group in groups]
    with ExitStack() as stack:
        for key, parameter in parameters.items():
            parameter.requires_grad_(bool(dims[key]))
            if dims[key]:
                stack.callback(parameter.register_post_accumulate_grad_hook(take).remove)
        for loss in losses:
            products.clear()
            loss.backward()
            count += 1
            for total, changes in zip(squares, _summed(groups, change, 1), strict=True):
                total += changes**2
    for place in (place for group in groups for place in group.places):
        if (parameter := _parameter(model, place)) is not None and id(parameter) not in seen:
            raise InputError(f"no calibration batch gives {place.tensor} a gradient; give calibration data")
    return [np.sqrt(total / max(count, 1)) for total in squares]


def activation(model: nn.Module, groups: Sequence[Group], batches: Iterable[tuple[Any, ...]]) -> Scores:
    """Mean absolute input of the linear layers and convolutions that read a unit, times their weights for it.

    Args:
        batches: inputs of the model; it runs in evaluation mode, without gradients.

    Raises:
        InputError: there are no batches.
    """
    means = _input_means(model, batches)

    def read(place: Place) -> np.ndarray | None:
        parameter, mean = _parameter(model, place), means.get(place.tensor.removesuffix(".weight"))
        if parameter is None or place.dim != 1 or mean is None or len(mean) != parameter.shape[1]:
            return None
        return _slices(parameter, place.dim, torch.abs) * mean

    return _summed(groups, read, 1)


def random(groups: Sequence[Group], seed: int) -> Scores:
    """Uniform numbers; the same for the same seed."""
    generator = np.random.default_rng(seed)
    return [generator.random(len(group)) for group in groups]


def _parameter(model: nn.Module | Weights, place: Place) -> Tensor | None:
    """The parameter of a place; None for a statistic."""
    if not isinstance(model, nn.Module):
        return model(place.tensor)
    path, _, leaf = place.tensor.rpartition(".")
    value = getattr(model.get_submodule(path), leaf)
    return value if isinstance(value, nn.Parameter) else None


def _slices(tensor: Tensor, dim: int, function: Callable[[Tensor], Tensor]) -> np.ndarray:
    """Σ function(tensor) for each index of dimension `dim`, summed in float64."""
    others = [other for other in range(tensor.dim()) if other != dim]
    values = function(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)))
    return (values.sum(others, dtype=torch.float64) if others else values.double()).cpu().numpy()


def _summed(groups: Sequence[Group], of_place: Callable[[Place], np.ndarray | None], power: int) -> Scores:
    scores = []
    for group in groups:
        total = np.zeros(len(group))
        for position, place in enumerate(group.places):
            values = of_place(place)
            if values is not None:
                total += [values[unit[position]].sum() for unit in group.units]
        scores.append(total ** (1 / power))
    return scores


def _input_means(model: nn.Module, batches: Iterable[tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Module → mean |input| for each input channel of linear layers and convolutions without groups."""
    if isinstance(model, fx.GraphModule):
        watched = _Inputs(model)
        with torch.no_grad():
            for batch in batches:
                watched.run(*batch)
        return _means(watched.sums, watched.counts)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, channel: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].detach().abs().movedim(channel, -1).flatten(0, -2)
            sums[name] = sums.get(name, 0) + values.double().sum(0)
            counts[name] = counts.get(name, 0) + values.shape[0]

        return add

    training = model.training
    model.eval()
    try:
        with ExitStack() as stack, torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and getattr(module, "groups", 1) == 1:
                    handle = module.register_forward_pre_hook(watch(name, -1 if isinstance(module, nn.Linear) else 1))
                    stack.callback(handle.remove)
            for batch in batches:
                model(*batch)
    finally:
        model.train(training)
    return _means(sums, counts)


def _means(sums: dict[str, Tensor], counts: dict[str, int]) -> dict[str, np.ndarray]:
    if not sums:
        raise InputError("activation importance needs at least one batch of inputs; give calibration data")
    return {name: (total / counts[name]).cpu().numpy() for name, total in sums.items()}


class _Inputs(fx.Interpreter):
    """Runs a graph and sums the inputs of what reads a weight."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        channel = _READERS.get(operator_name(n))
        weight = n.args[1] if channel is not None else None
        if channel is not None and isinstance(weight, fx.Node) and weight.op == "get_attr":
            (x,) = cast(Any, self.map_nodes_to_values(n.args[:1], n))
            name, values = str(weight.target).removesuffix(".weight"), x.abs().movedim(channel, -1).flatten(0, -2)
            self.sums[name] = self.sums.get(name, 0) + values.double().sum(0)
            self.counts[name] = self.counts.get(name, 0) + values.shape[0]
        return super().run_node(n)


_READERS = {"linear": -1, "conv1d": 1, "conv2d": 1, "conv3d": 1}
"""Operators whose weight is (outputs, inputs, …), and the dimension of their input that holds the inputs."""
