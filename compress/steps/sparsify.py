"""The pipeline's step `sparsify`: training that brings whole groups of coupled slices to exactly zero.

The penalty is group-L1 over the dependency graph of pruning: strength × Σ over units of √size × ‖all that the unit
takes‖₂ (group lasso, Yuan and Lin, 2006). It is not added to the loss, whose gradient would only make units small:
after each update a unit's norm loses learning rate × strength × √size, and a unit whose norm is below that becomes zero
(proximal step; Parikh and Boyd, Proximal Algorithms, section 6.5.1). A unit at zero adds nothing, so pruning takes it
first and the network's output stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from penjing.compress.distill.task import WrappedTask
from penjing.compress.distill.training import train_checkpoint
from penjing.compress.families.base import Pruner
from penjing.compress.prune.graph import Group, dependency_graph
from penjing.compress.steps.base import Context, Step
from penjing.compress.steps.prune_checks import check_parts, check_protected
from penjing.compress.steps.train import TrainedStep
from penjing.core.errors import ConfigError
from penjing.core.progress import Progress
from penjing.core.work import Places
from penjing.train.families.base import Task
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import RunRecipe


class Sparsify(TrainedStep):
    """Training that drives whole groups to zero, for a prune after it."""

    kind: Literal["sparsify"] = Field(default="sparsify", description="Train whole units down to zero.")
    strength: float = Field(
        gt=0,
        description="Of the penalty: a unit at rest vanishes when the sum of all learning rates times it reaches the "
        "root mean square of the unit's weights.",
    )
    parts: tuple[Literal["ffn", "heads"], ...] | None = Field(
        default=None, description='Of a decoder, "ffn" and "heads"; a classifier shrinks everywhere.'
    )
    protect: tuple[str, ...] = Field(default=(), description="Shell patterns of parameters whose units stay.")

    @model_validator(mode="after")
    def _stays_at_zero(self) -> Sparsify:
        if self.average is not None:
            raise ValueError("averaged weights are never exactly zero; leave average out")
        return self

    def check_order(self, before: tuple[Step, ...], after: tuple[Step, ...]) -> None:
        """See `Step`."""
        if not any(later.kind == "prune" for later in after):
            raise ConfigError(
                "no prune follows this sparsify, so that nothing removes what it drives to zero; put a prune after it"
            )

    def check(self, context: Context) -> None:
        """See `Step`."""
        super().check(context)
        if context.family.name == "vision_language":
            raise ConfigError(
                f"sparsify is not for {context.family.said} so far; prune {context.model} and let it learn"
            )
        check_parts(self.parts, None, context)
        if self.protect:
            check_protected(self.protect, context.model, context.family.skeleton(context.model).model)

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`; the record says for each group how many of its units are exactly zero."""
        pruner, training = context.family.need("pruner", "pruned"), context.family.need("training", "trained")
        progress = context.progress
        groups = groups_of(pruner, places.source, self.parts, self.protect, progress)

        def wrap(task: Task, recipe: RunRecipe) -> Task:
            return Sparsified(task, recipe, groups, self.strength)

        names = {"source": places.source}
        record = train_checkpoint(
            places.source, places.partial, self, training, context.data, places.scratch, progress, wrap, names
        )
        zeros = zero_units(pruner, places.partial, groups, progress)
        rows = [
            {"name": group.name, "units": len(group), "zero": len(units)}
            for group, units in zip(groups, zeros, strict=True)
        ]
        share = sum(row["zero"] for row in rows) / max(sum(row["units"] for row in rows), 1)
        progress.note(f"{share:.1%} of the units are exactly zero")
        return record | {"groups": rows, "zero_share": share}


class Shrinkage:
    """Soft thresholds of the norms of all units of some groups, in place.

    Args:
        model: holds the parameters; statistics of norms are left alone.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Group]) -> None:
        parameters = dict(model.named_parameters())
        self._groups: list[tuple[int, Tensor, list[tuple[nn.Parameter, int, Tensor]]]] = []
        for group in groups:
            parts: list[tuple[nn.Parameter, int, Tensor]] = []
            sizes = torch.zeros(len(group) + 1)
            for position, place in enumerate(group.places):
                if (parameter := parameters.get(place.tensor)) is None:
                    continue
                size = parameter.shape[place.dim]
                owner = torch.full((size,), len(group))  # the last: no unit's
                for unit, indices in enumerate(group.units):
                    owner[torch.from_numpy(indices[position])] = unit
                sizes.index_add_(0, owner, torch.full((size,), parameter.numel() / size))
                parts.append((parameter, place.dim, owner.to(parameter.device)))
            if parts:
                device = parts[0][0].device
                self._groups.append((len(group), sizes[:-1].sqrt().to(device), parts))

    @torch.no_grad()
    def norms(self) -> list[Tensor]:
        """Of each group, (units,) float32: the Euclidean norm of all that a unit takes."""
        return [self._norms(units, parts) for units, _, parts in self._groups]

    @torch.no_grad()
    def shrink(self, threshold: float) -> None:
        """Take threshold × √size from the norm of each unit; what would fall below zero becomes zero."""
        for units, roots, parts in self._groups:
            norms = self._norms(units, parts)
            factors = (1.0 - threshold * roots / norms.clamp(min=1e-30)).clamp(min=0.0)
            factors = torch.cat([factors, factors.new_ones(1)])
            for parameter, dim, owner in parts:
                shape = [-1 if axis == dim else 1 for axis in range(parameter.dim())]
                parameter.mul_(factors[owner].view(shape))

    @staticmethod
    def _norms(units: int, parts: list[tuple[nn.Parameter, int, Tensor]]) -> Tensor:
        squares = torch.zeros(units + 1, device=parts[0][0].device)
        for parameter, dim, owner in parts:
            others = [axis for axis in range(parameter.dim()) if axis != dim]
            values = torch.linalg.vector_norm(parameter, dim=others).square() if others else parameter.square()
            squares.index_add_(0, owner, values)
        return squares[:-1].sqrt()


class Sparsified(WrappedTask):
    """`task`, with a proximal step of `groups` after each update."""

    def __init__(self, task: Task, recipe: RunRecipe, groups: Sequence[Group], strength: float) -> None:
        super().__init__(task)
        self._recipe = recipe
        self._groups = groups
        self._strength = strength

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: the threshold follows the learning rate of the update."""
        shrinkage, recipe = Shrinkage(model, self._groups), self._recipe

        def proximal(step: int) -> None:
            shrinkage.shrink(self._strength * recipe.learning_rate.at(step - 1, recipe.steps))

        return (*super().after_update(model, world), proximal)


def groups_of(
    pruner: Pruner, source: Path, parts: Sequence[str] | None, protect: Sequence[str], progress: Progress
) -> list[Group]:
    """The groups that shrink: everything that `parts` name, but what `protect` names.

    Raises:
        InputError: the checkpoint is damaged, or its network cannot be analysed.
    """
    subject = pruner.open(source, parts or pruner.parts[:1], (), progress)
    graph = dependency_graph(subject.model, subject.example, protect=protect)
    return [group for groups in subject.parts(graph.groups).values() for group in groups]


def zero_units(pruner: Pruner, folder: Path, groups: Sequence[Group], progress: Progress) -> list[list[int]]:
    """The units of each group that are exactly zero in the checkpoint `folder`: what `remove` takes for nothing."""
    norms = Shrinkage(pruner.open(folder, (), (), progress).network(), groups).norms()
    return [torch.nonzero(values == 0).flatten().tolist() for values in norms]
