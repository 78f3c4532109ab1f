"""What pruning needs to know of a checkpoint, whatever network it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from penjing.compress.prune.graph import Group
from penjing.compress.prune.ranking import Choice
from penjing.compress.prune.surgery import Cut

Part = Literal["channels", "ffn", "heads", "hidden", "vision_ffn", "vision_heads"]
Shapes = Mapping[str, Sequence[int]]


class Subject(Protocol):
    """A checkpoint that is pruned. Tensors go by their names in `model`."""

    folder: Path
    dense: nn.Module
    """The network of the checkpoint without storage (device "meta")."""
    model: nn.Module
    """The same without the layers that leave as a whole: what is analysed."""
    example: tuple[Tensor, ...]
    """Inputs on "meta"."""
    inputs: int
    """How many of `unit` the example holds."""
    unit: str
    """What is counted: "image", or "token" where the network takes windows of tokens."""
    dropped: tuple[int, ...]
    """Layers that leave as a whole, by number from 0."""
    kept_whole: dict[str, str]
    """Groups that `parts` leaves out because they failed when they were tried, by name: why."""

    def weights(self, name: str) -> Tensor | None:
        """The parameter `name` as it is stored; None for a statistic."""
        ...

    def network(self) -> nn.Module:
        """`model` with its weights in float32, in evaluation mode, on the CPU."""
        ...

    def parts(self, groups: Sequence[Group]) -> dict[Part, list[Group]]:
        """The groups that are to lose units, by what they are."""
        ...

    def config_of(self, shapes: Shapes, choice: Choice) -> Any:
        """The architecture whose tensors have `shapes`: that of the checkpoint without `choice`."""
        ...

    def build(self, config: Any) -> nn.Module:
        """The network of an architecture of `config_of`, in evaluation mode, on the default device."""
        ...

    def item_bytes(self, name: str) -> int:
        """Bytes of one stored element of a tensor."""
        ...

    def write(self, partial: Path, config: Any, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """Write the whole checkpoint: what `cuts` leave of every tensor, under `config`."""
        ...


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter and statistic; tied ones under their first name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tuple(tensor.shape) for name, tensor in named}
