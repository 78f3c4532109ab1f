"""Calibration samples of graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penjing.core.graph.network import Network


@dataclass(frozen=True)
class ExampleData:
    """The inputs that came with a network: what there is where a user gives no data."""

    network: Network

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`: all inputs of the network, in order, once."""
        yield self.network.inputs()

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`; without labels there is no cross-entropy: half the mean square of the outputs stands in."""
        for inputs in self.inputs():
            yield output_energy(model(*inputs))


def output_energy(outputs: tuple[Tensor, ...]) -> Tensor:
    """Half the mean square of all floating outputs: its gradient says how far a unit moves them."""
    floating = [output.flatten() for output in outputs if output.is_floating_point()]
    return torch.cat(floating).square().mean() / 2
