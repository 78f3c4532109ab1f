"""A task of train's loop with a teacher: the student's own task, and what distillation adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penjing.compress.distill.objective import Distillation
from penjing.train.data.stream import Stream
from penjing.train.objective import Batch, TaskObjective
from penjing.train.tasks import Task
from penjing.train.world import World

PROJECTIONS = "distill_projections"  # a submodule of the student while it learns


class Distilled:
    """`task`, learnt by `objective`.

    Args:
        projections: makes the parameters that the objective itself trains: part of the run and its checkpoints, never
            of the exported network. None: there are none.
    """

    def __init__(
        self,
        task: Task,
        objective: Distillation,
        seed: int,
        projections: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._task = task
        self._seed = seed
        self._projections = projections
        self.unit = task.unit
        self.objective: TaskObjective = objective

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = self._task.build_model()
        if self._projections is not None:
            model.add_module(PROJECTIONS, self._projections())
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`; projections begin as the identity, or as a random rotation where widths differ."""
        if self._projections is None:
            return self._task.initialize(model)
        projections = model.get_submodule(PROJECTIONS)
        delattr(model, PROJECTIONS)  # what reads a checkpoint looks for all parameters there
        self._task.initialize(model)
        torch.manual_seed(self._seed)
        for weight in projections.parameters():
            (nn.init.eye_ if weight.shape[0] == weight.shape[1] else nn.init.orthogonal_)(weight)
        model.add_module(PROJECTIONS, projections)

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        return self._task.example(micro_batch)

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        return self._task.stream(micro_batch, world)

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        return self._task.held_out(micro_batch, world)

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`."""
        return self._task.after_update(model, world)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`; without the projections."""
        if self._projections is not None:
            delattr(model, PROJECTIONS)
        self._task.export(model, folder, created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`: the pipeline goes on by itself."""
        return ""
