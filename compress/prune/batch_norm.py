"""Statistics of batch norms, estimated anew: pruned layers give the layers after them other inputs than before.

After Wu and Johnson, "Rethinking 'Batch' in BatchNorm" (https://arxiv.org/abs/2105.07576, section 3): the moments of
all samples, each with the same weight, take the place of the moving average that training leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penjing.core.errors import InputError


class Moments:
    """Count, sum and sum of squares of each channel, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_C: Tensor | float = 0.0
        self.squares_C: Tensor | float = 0.0

    def add(self, x_NC: Tensor) -> None:
        """Take (N, C) values."""
        values = x_NC.detach().double()
        self.count += values.shape[0]
        self.sum_C = self.sum_C + values.sum(0)
        self.squares_C = self.squares_C + values.square().sum(0)

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and unbiased variance, (C,) each."""
        mean_C = torch.as_tensor(self.sum_C / self.count)
        biased_C = torch.as_tensor(self.squares_C / self.count) - mean_C.square()
        return mean_C, biased_C.clamp_min(0) * (self.count / (self.count - 1))


def not_enough(count: int) -> InputError:
    """What is said of `count` values a channel."""
    return InputError(
        f"statistics of batch norms need two values a channel at least, there were {count}; give more samples in [data]"
    )


@torch.no_grad()
def reestimate_batch_norms(model: nn.Module, inputs: Iterable[tuple[Tensor, ...]]) -> int:
    """Set running mean and variance of every batch norm, in place, to the moments of its inputs over all `inputs`.

    Each norm normalises by its batch's own moments meanwhile, as in training, so that layers that follow see what they
    would with statistics that are right already. Every value weighs the same, whatever the sizes of the batches; sums
    are in float64. Nothing else of the model changes, its mode neither.

    Args:
        inputs: arguments of the model, a few large batches rather than many small ones.

    Returns:
        How many batch norms there are; with none, `inputs` is not touched.

    Raises:
        InputError: there are batch norms and no input, or a single value a channel.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return 0
    moments = {norm: Moments() for norm in norms}

    def watch(norm: _BatchNorm) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, arguments: moments[norm].add(arguments[0].movedim(1, -1).flatten(0, -2))

    modes = {module: module.training for module in model.modules()}
    kept = {norm: (norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms}
    model.eval()
    try:
        with ExitStack() as stack:
            for norm in norms:
                stack.callback(norm.register_forward_pre_hook(watch(norm)).remove)
                norm.running_mean = norm.running_var = None  # a norm without statistics takes those of the batch
            for arguments in inputs:
                model(*arguments)
    finally:
        for norm in norms:
            norm.running_mean, norm.running_var, norm.num_batches_tracked = kept[norm]
        for module, training in modes.items():
            module.training = training
    for norm, found in moments.items():
        if found.count < 2:
            raise not_enough(found.count)
        mean_C, variance_C = found.result()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean_C)
        norm.running_var.copy_(variance_C)
    return len(norms)
