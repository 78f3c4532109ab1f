"""What a recipe trains: a task brings the model, the streams, the objective and the export that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.train.data.stream import Stream
from penjing.train.families.classifier import ImageClassification
from penjing.train.families.decoder import LanguageModeling
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.data import FashionData, TextData
from penjing.train.recipe.model import DecoderModel, ResNetModel
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.state.initial import Weights


class Task(Protocol):
    """Everything that depends on the kind of data and model."""

    unit: str  # what the objective counts, in the plural
    objective: TaskObjective

    def build_model(self) -> nn.Module:
        """A new model in float32 on the CPU; its weights mean nothing yet."""
        ...

    def initialize(self, model: nn.Module) -> None:
        """Give `model` the weights that the run begins with; the same for the same recipe."""
        ...

    def weights(self) -> Weights | None:
        """What `initialize` gives, a part at a time: a process that holds a part of the model fills only that. None
        where the whole is needed: every process then builds it, before it is shared."""
        ...

    def example(self, micro_batch: int) -> Batch:
        """A batch of the size and kind of a micro-batch."""
        ...

    def stream(self, micro_batch: int, world: World) -> Stream:
        """This process's training data."""
        ...

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """This process's share of one pass over the held-out data."""
        ...

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """What the loop calls with the step's number after each update of `model`."""
        ...

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """Write the checkpoint that other stages read into `folder`, not yet published."""
        ...

    def next_command(self, folder: Path) -> str:
        """What to type once the checkpoint lies in `folder`; empty if there is nothing to suggest."""
        ...


def build_task(recipe: TrainRecipe, progress: Progress) -> Task:
    """The task of a recipe; data is fetched and prepared here, before processes join.

    Raises:
        ConfigError, InputError, SetupError: whatever is wrong with the data or does not fit the model.
    """
    model, data = recipe.model, recipe.data
    if isinstance(model, DecoderModel) and isinstance(data, TextData):
        return LanguageModeling(recipe, model, data, progress)
    if isinstance(model, ResNetModel) and isinstance(data, FashionData):
        return ImageClassification(recipe, model, data, progress)
    fitting = "text" if isinstance(model, DecoderModel) else "fashion-mnist"
    raise ConfigError(
        f"data.kind = {data.kind!r} does not fit model.architecture = {model.architecture!r}; use kind = {fitting!r}"
    )
