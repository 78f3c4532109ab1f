"""What a recipe trains: a task brings the model, the streams, the objective and the export that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.family import FAMILIES, family_of, table_of
from penjing.core.progress import Progress
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.stream import Stream
from penjing.train.objective.balancing import BalancingConfig
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.data import DataConfig
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe
from penjing.train.state.initial import Weights

NOTHING_HELD_OUT = "data.held_out = 0 leaves nothing to evaluate on; raise it, or set evaluation.every = 0"


class Task(Protocol):
    """Everything that depends on the kind of data and model."""

    unit: str  # what the run's rates count, in the plural
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


@runtime_checkable
class MixedTask(Task, Protocol):
    """A task whose stream mixes domains, and follows how each is learnt."""

    def held_out_parts(self, micro_batch: int, world: World) -> Mapping[str, Callable[[], Iterator[Batch]]]:
        """Domain → this process's share of one pass over its held-out data."""
        ...

    def hear(self, stream: Prefetched, results: dict[str, float]) -> dict[str, float]:
        """Take an evaluation with "loss/DOMAIN", the same in all processes; what to record of the mixture."""
        ...


@runtime_checkable
class ShowingTask(Task, Protocol):
    """A task that shows what its model makes of something at each evaluation."""

    def samples(self, model: nn.Module, world: World) -> Callable[[int], None] | None:
        """What the loop calls with the step's number before each evaluation, in all processes; None shows nothing."""
        ...


@runtime_checkable
class KeepingTask(Task, Protocol):
    """A task that keeps more in memory than the model that learns."""

    def kept_bytes(self, world: World) -> int:
        """Bytes of this process that are taken once training begins, before anything is allocated."""
        ...


@dataclass(frozen=True)
class Family:
    """What training needs of a kind of network; `FAMILY` of `penjing.train.families.NAME` is one.

    Attributes:
        data: the kinds of [data] that its networks learn from.
        new_task: (recipe, progress) → the task of training the recipe's [model], whose [data] is of that kind.
        checkpoint_task: (checkpoint, recipe, progress) → the task of training the network in a folder further: its
            architecture and, in what is exported, all else that belongs to it. `recipe.initial` is that folder.
            Both fetch and prepare the data, and raise PenjingError for whatever is wrong with it.
    """

    data: tuple[type[DataConfig], ...]
    new_task: Callable[[TrainRecipe, Progress], Task]
    checkpoint_task: Callable[[Path, RunRecipe, Progress], Task]


def build_task(recipe: TrainRecipe, progress: Progress) -> Task:
    """The task of a recipe; data is fetched and prepared here, before processes join.

    Raises:
        ConfigError, InputError, SetupError: whatever is wrong with the data or does not fit the model.
    """
    if recipe.initial is not None:
        return build_checkpoint_task(recipe.initial, recipe, progress)
    assert recipe.model is not None, "a recipe has one or the other"
    described = f"model.architecture = {recipe.model.architecture!r}"
    _check_sections(recipe, recipe.model.family, described)
    family: Family = table_of("train", recipe.model.family)
    _check_data(recipe, family, described)
    return family.new_task(recipe, progress)


def build_checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> Task:
    """The task of training the network in the checkpoint `folder` further; `recipe.initial` is that folder.

    Raises:
        ConfigError, InputError, SetupError: networks of its family cannot be trained; or whatever is wrong with the
            data or does not fit the network.
    """
    name = family_of(folder)
    _check_sections(recipe, name, str(folder))
    family: Family = table_of("train", name)
    _check_data(recipe, family, f"{folder}, a network of the family {name!r}")
    return family.checkpoint_task(folder, recipe, progress)


def _check_sections(recipe: RunRecipe, name: str, model: str) -> None:
    given = {
        "[adapter] is": recipe.adapter is not None,
        "[balancing] is": recipe.balancing != BalancingConfig(),
        "evaluation.prompts are": bool(recipe.evaluation.prompts),
    }
    if name != "decoder" and (wrong := [section for section, is_set in given.items() if is_set]):
        raise ConfigError(f"{wrong[0]} for decoders, and {model} is {FAMILIES.get(name, name)}; leave it out")


def _check_data(recipe: RunRecipe, family: Family, model: str) -> None:
    wanted = {"dpo": "preference", "reward": "preference", "clip": "pairs", "siglip": "pairs"}
    if (kind := wanted.get(recipe.objective.kind, recipe.data.kind)) != recipe.data.kind:
        compared = "answers" if kind == "preference" else "images and texts"
        raise ConfigError(
            f"objective.kind = {recipe.objective.kind!r} compares pairs of {compared}; give data.kind = {kind!r}"
        )
    if not isinstance(recipe.data, family.data):
        kinds = [repr(get_args(each.model_fields["kind"].annotation)[0]) for each in family.data]
        raise ConfigError(f"data.kind = {recipe.data.kind!r} does not fit {model}; use kind = {' or '.join(kinds)}")
