"""How much a unit matters: one number for each unit of a group, larger is more important.

- `l1`, `l2`: magnitude of everything the unit takes (Li et al., https://arxiv.org/abs/1608.08710, over coupled slices).
- `taylor`: |Σ weight × gradient|, the change of the loss in first order (Molchanov et al.,
  https://arxiv.org/abs/1906.10771); needs gradients in the parameters.
- `activation`: mean |input| of the layers that read the unit, times the magnitude of their weights for it (after
  Minitron, https://arxiv.org/abs/2407.14679, and Wanda, https://arxiv.org/abs/2306.11695); needs calibration inputs.
- `random`: a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from penjing.compress.prune.graph import Group, Place
from penjing.core.errors import InputError

Kind = Literal["l1", "l2", "taylor", "activation", "random"]
Scores = list[np.ndarray]  # for each group, (units,) float64
Weights = Callable[[str], Tensor | None]  # a parameter by its name; None for a statistic


def magnitude(model: nn.Module | Weights, groups: Sequence[Group], power: Literal[1, 2] = 1) -> Scores:
    """L1 or L2 norm of the slices of weights and biases that each unit takes.

    Args:
        model: the network, or a function that reads its weights one at a time, so that it is never in memory whole.
    """
    return _summed(groups, lambda place: _slices(_parameter(model, place), place, lambda w: w.abs() ** power), power)


def taylor(model: nn.Module, groups: Sequence[Group]) -> Scores:
    """First-order change of the loss when a unit goes, from the gradients that the parameters hold.

    Raises:
        InputError: a parameter has no gradient.
    """

    def change(place: Place) -> np.ndarray | None:
        parameter = _parameter(model, place)
        if parameter is None:
            return None
        if parameter.grad is None:
            raise InputError(f"{place.tensor} has no gradient; run the loss backward over some batches first")
        gradient = parameter.grad
        return _slices(parameter, place, lambda w: w * gradient)

    return [np.abs(scores) for scores in _summed(groups, change, 1)]


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
        weights = _slices(parameter, place, torch.abs)
        return None if weights is None else weights * mean

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


def _slices(tensor: Tensor | None, place: Place, function: Callable[[Tensor], Tensor]) -> np.ndarray | None:
    """Σ function(tensor) for each index of the place's dimension."""
    if tensor is None:
        return None
    others = [dim for dim in range(tensor.dim()) if dim != place.dim]
    values = function(tensor.detach().double())
    return (values.sum(others) if others else values).cpu().numpy()


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
    if not sums:
        raise InputError("activation importance needs at least one batch of inputs; give calibration data")
    return {name: (total / counts[name]).cpu().numpy() for name, total in sums.items()}
