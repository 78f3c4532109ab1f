"""Networks for architectures whose norms subtract the mean: their streams have none, and what a norm adds there is
found from the biases that it became here (see `core.folded.centred`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.folded.placement import WRITERS

LARGEST_MEAN = 0.3  # of what columns of random numbers have: with 4 bits they have 0.15, with 8 bits 0.01
LARGEST_REST = 0.05  # of a bias that is no product of its layer's weight, as a share


def check_mean(names: Iterable[str], tensor: Callable[[str], Tensor], source: str) -> None:
    """Raise InputError unless what the network adds to its stream has no mean, but for what rounding left.

    Args:
        tensor: name → its values in float32.
    """
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not module.endswith(WRITERS):
            continue
        weight = tensor(name)
        mean, size = weight.mean(dim=0), weight.square().mean(dim=0)
        if mean.square().sum() * len(weight) > LARGEST_MEAN**2 * size.sum():
            raise InputError(
                f"{source}: {name} adds a mean to the stream of a network whose GGUF architecture subtracts it in each "
                "norm, and so it is not written as GGUF; penjing serves the artifact as it is"
            )


def shift_of(biases: Sequence[str], tensor: Callable[[str], Tensor], refuse: Callable[[str], None]) -> Tensor:
    """(E,) what a norm adds of which the `biases` are the products with their layers' weights.

    Args:
        tensor: name → its values in float32.
        refuse: raises InputError for what there is no place for.
    """
    weight = torch.cat([tensor(f"{bias.removesuffix('bias')}weight") for bias in biases]).double()
    bias = torch.cat([tensor(each) for each in biases]).double()
    gram = weight.t() @ weight
    gram.diagonal().add_(1e-9 * gram.diagonal().mean())
    shift = torch.linalg.solve(gram, weight.t() @ bias)
    if (weight @ shift - bias).norm() > LARGEST_REST * bias.norm():
        refuse(" and ".join(biases))
    return shift.float()
