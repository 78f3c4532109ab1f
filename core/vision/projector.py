"""What makes rows of a decoder's width of what a vision transformer gives; a kind is a function in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.vision.paired_config import Activation
from penjing.core.vision.vit import ACTIVATIONS


class ProjectorConfig(Config):
    """Everything but its widths that fixes the computation of a projector."""

    kind: Literal["linear", "mlp"] = Field(
        default="linear", description="linear: one matrix, as Idefics3 has it; mlp: two with a curve between, as LLaVA."
    )
    bias: bool = Field(default=False, description="Whether its layers add a bias.")
    activation: Activation = Field(default="gelu", description="Of an mlp, what is between its layers.")


class TwoLayers(nn.Module):
    """Two linear layers with a curve between; names are those of LLaVA's `multi_modal_projector`."""

    def __init__(self, config: ProjectorConfig, inner: int, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inner, width, config.bias), nn.Linear(width, width, config.bias)
        self._activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(…, inner) → (…, width)."""
        return self.linear_2(self._activation(self.linear_1(x)))


_KINDS: dict[str, Callable[[ProjectorConfig, int, int], nn.Module]] = {
    "linear": lambda config, inner, width: nn.Linear(inner, width, config.bias),
    "mlp": TwoLayers,
}


def build_projector(config: ProjectorConfig, inner: int, width: int) -> nn.Module:
    """The network (…, inner) → (…, width)."""
    return _KINDS[config.kind](config, inner, width)


def linears(projector: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Its linear layers in the order in which they are computed, with their names in it; "" is itself."""
    return [(name, module) for name, module in projector.named_modules() if isinstance(module, nn.Linear)]
