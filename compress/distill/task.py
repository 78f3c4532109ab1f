"""Tasks of train's loop around the own task of a checkpoint: they change what is learnt, not from what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penjing.compress.distill.cache import Cached, TeacherCache
from penjing.compress.distill.objective import Distillation
from penjing.train.data.stream import OrderedStream, Stream
from penjing.train.data.tokens import TokenRows
from penjing.train.families.base import ShowingTask, Task
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.processes.world import World

PROJECTIONS = "distill_projections"  # a submodule of the student while it learns


class WrappedTask:
    """`task` as it is; see `Task` for every method."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.unit = task.unit
        self.objective: TaskObjective = task.objective

    def build_model(self) -> nn.Module:
        return self._task.build_model()

    def initialize(self, model: nn.Module) -> None:
        self._task.initialize(model)

    def weights(self) -> None:
        """What wraps a task changes what its model begins with."""

    def example(self, micro_batch: int) -> Batch:
        return self._task.example(micro_batch)

    def stream(self, micro_batch: int, world: World) -> Stream:
        return self._task.stream(micro_batch, world)

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        return self._task.held_out(micro_batch, world)

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        return self._task.after_update(model, world)

    def samples(self, model: nn.Module, world: World) -> Callable[[int], None] | None:
        return self._task.samples(model, world) if isinstance(self._task, ShowingTask) else None

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        self._task.export(model, folder, created_by)

    def next_command(self, folder: Path) -> str:
        return ""  # the pipeline goes on by itself


class Distilled(WrappedTask):
    """`task`, learnt by `objective`.

    Args:
        projections: makes the parameters that the objective itself trains: part of the run and its checkpoints, never
            of the exported network. None: there are none.
        cache: what the teacher said of each sample, instead of the teacher.
    """

    def __init__(
        self,
        task: Task,
        objective: Distillation,
        seed: int,
        projections: Callable[[], nn.Module] | None = None,
        cache: TeacherCache | None = None,
    ) -> None:
        super().__init__(task)
        self._cache = cache
        self._seed = seed
        self._projections = projections
        self.objective: TaskObjective = objective

    def build_model(self) -> nn.Module:
        """See `Task`."""
        model = super().build_model()
        if self._projections is not None:
            model.add_module(PROJECTIONS, self._projections())
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`; projections begin as the identity, or as a random rotation where widths differ."""
        if self._projections is None:
            return super().initialize(model)
        projections = model.get_submodule(PROJECTIONS)
        delattr(model, PROJECTIONS)  # what reads a checkpoint looks for all parameters there
        super().initialize(model)
        torch.manual_seed(self._seed)
        for weight in projections.parameters():
            (nn.init.eye_ if weight.shape[0] == weight.shape[1] else nn.init.orthogonal_)(weight)
        model.add_module(PROJECTIONS, projections)

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        batch = super().example(micro_batch)
        return batch if self._cache is None else batch | self._cache.read(np.zeros(micro_batch, dtype=np.int64))

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        stream = super().stream(micro_batch, world)
        if self._cache is None:
            return stream
        assert isinstance(stream, OrderedStream)
        assert isinstance(stream.samples, TokenRows)
        return OrderedStream(Cached(stream.samples, self._cache), stream.order)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`; without the projections."""
        if self._projections is not None:
            delattr(model, PROJECTIONS)
        super().export(model, folder, created_by)
