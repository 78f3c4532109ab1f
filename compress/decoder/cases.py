"""A decoder layer with the weights of every case that a search may choose: fewer channels of its MLP, 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from penjing.compress.decoder.layer import int4_rule
from penjing.compress.decoder.settings import Int8Settings
from penjing.core.models.decoder import DecoderLayer

DOWN = "mlp.down_proj"
MLP = ("mlp.gate_proj", "mlp.up_proj", DOWN)


class LayerCases:
    """A layer of the network in floating point, with its weights of 4 bits (widened again).

    Args:
        module: the layer as it is; `take` changes it.
        units: of each option of its width the channels of its MLP that stay; None: all.
    """

    def __init__(self, module: DecoderLayer, units: list[Tensor | None]) -> None:
        self.module, self.units = module, units
        linears = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        self.weights = {name: layer.weight.detach() for name, layer in linears.items()}
        self.biases = {name: layer.bias.detach() for name, layer in linears.items() if layer.bias is not None}
        # (N, K) in 4 bits; of `DOWN` for each option, which is rounded as it is cut, else option 0.
        self._packed: dict[tuple[str, int], Tensor] = {}

    def round(self, settings: Int8Settings, inputs: Mapping[str, Sequence[str]], samples: dict[str, Tensor]) -> None:
        """Find the weights of 4 bits.

        Args:
            inputs: group of layers with one input → their names. samples: group → (rows, K) of that input.
        """
        for group, names in inputs.items():
            for name in names:
                if name != DOWN:
                    rule = int4_rule(settings, samples[group])
                    self._packed[name, 0] = rule(self.weights[name]).dequantize()
                    continue
                for option, staying in enumerate(self.units):
                    if staying is not None and not len(staying):
                        continue  # the layer leaves
                    kept = slice(None) if staying is None else staying
                    rule = int4_rule(settings, samples[group][:, kept].contiguous())
                    self._packed[name, option] = rule(self.weights[name][:, kept].contiguous()).dequantize()

    def take(self, option: int, *, packed: bool) -> None:
        """Give the module the weights of an option of its width, in 4 bits or as they are."""
        for name, whole in self.weights.items():
            staying = self.units[option] if name in MLP else None
            weight = whole if not packed else self._packed[name, option if name == DOWN else 0]
            if staying is not None and not (name == DOWN and packed):
                weight = weight[:, staying] if name == DOWN else weight[staying]
            linear = self.module.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if name in self.biases:
                bias = self.biases[name] if staying is None or name == DOWN else self.biases[name][staying]
                linear.bias = nn.Parameter(bias, requires_grad=False)
