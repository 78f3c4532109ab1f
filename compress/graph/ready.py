"""A floating graph made ready for quantizers: one form, equalised and smoothed, and a budget of bits resolved."""

from __future__ import annotations

from typing import TypeVar

from penjing.compress.graph.bits import within_bits
from penjing.compress.graph.equalize import equalize
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.smooth import smooth
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.samples.data import Samples
from penjing.core.graph.network import Network

S = TypeVar("S", bound=GraphSettings)


def ready(network: Network, settings: S, samples: Samples) -> tuple[Network, S]:
    """A copy of `network` that quantizers can be placed into, which answers the same, and settings that name the layers
    that a budget leaves floating.

    Raises:
        ConfigError: the budget cannot be kept, or the target cannot express the settings.
        InputError: a weight or an activation is not finite, or the data do not fit.
    """
    made = prepared(network)
    if settings.equalize:
        equalize(made, samples.inputs())
    if settings.smooth:
        smooth(made, samples.inputs(), settings)
    resolved = within_bits(made, settings, samples.inputs)
    return made, settings.model_copy(update=resolved.model_dump(include={"keep", "effective_bits"}))
