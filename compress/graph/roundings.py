"""A calibrated graph held to its stored numbers layer by layer: no layer can hide what it does behind the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from penjing.compress.graph.place import quantizer_of
from penjing.compress.rounding.fake_quantize import ActivationQuantizer
from penjing.core.artifact.parity import FAKE_QUANTIZED, Difference, measured
from penjing.core.errors import InputError
from penjing.core.graph.network import Network

CALIBRATED = "calibrated"  # the network that calibration or training left, in floating point
ROUNDINGS = "roundings"
LARGEST_MEAN = 0.05  # steps, of one pair; biases that are stored as integers move it by 0.003 in OpenNSFW


@torch.no_grad()
def roundings(network: Network, codes: Sequence[Tensor], inputs: Sequence[Tensor]) -> Difference:
    """How far what each quantizer of `network` stores is from `codes`, in steps of its format.

    Behind each quantizer the network goes on with what `codes` says, so that what one layer does differently is not
    enlarged by the next: what is found is that layer's own.

    Args:
        network: calibrated or trained, in evaluation mode.
        codes: as `IntegerRun` leaves them, of the same inputs.

    Returns:
        The largest distance of any number, and the largest mean of any quantizer.

    Raises:
        InputError: a number is more than a step away, or a mean more than `LARGEST_MEAN`; the layer is named.
    """
    held = _Held(network, codes)
    held.run(*inputs)
    assert len(held.found) == len(codes), f"{len(held.found)} quantizers for {len(codes)} pairs"
    for name, largest, mean in held.found:
        if not (largest <= 1 and mean <= LARGEST_MEAN):
            raise InputError(
                f"parity: what is stored of {name} differs from the {CALIBRATED} network by {largest:.3g} steps, "
                f"{mean:.3g} on average; 1 and {LARGEST_MEAN} are allowed: keep the layers before it in floating "
                "point, and report it, because no setting should lead there"
            )
    return measured(
        (CALIBRATED, FAKE_QUANTIZED),
        ROUNDINGS,
        sum(each.numel() for each in codes),
        max((largest for _, largest, _ in held.found), default=0.0),
        max((mean for _, _, mean in held.found), default=0.0),
    )


class _Held(fx.Interpreter):
    """Runs a quantized graph; each quantizer gives what was stored.

    Attributes:
        found: of each quantizer, in order: its name, the largest distance and the mean.
    """

    def __init__(self, network: Network, codes: Sequence[Tensor]) -> None:
        super().__init__(network.module)
        self.found: list[tuple[str, float, float]] = []
        self._network, self._codes = network, codes

    def run_node(self, n: Node) -> Any:
        """See `fx.Interpreter`."""
        output = super().run_node(n)
        quantizer = quantizer_of(self._network, n)
        if not isinstance(quantizer, ActivationQuantizer) or not n.users:
            return output
        scale, codes = quantizer.positive_scale(), self._codes[len(self.found)].float()
        own, step = (output / scale).half().float(), torch.ones(())  # half: what is stored, less rounding
        if quantizer.format.name == "fp8":
            step = (own.abs().maximum(codes.abs()) / 8).clamp(2**-9)
        else:
            own = own.round()
        gaps = (own - codes).abs() / step
        self.found.append((quantizer.name, float(gaps.max()), float(gaps.mean())) if gaps.numel() else ("", 0.0, 0.0))
        return codes * scale
