"""How graphs learn inside a compression run: from the classes of samples, and from another graph's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import AfterValidator
from torch import Tensor, nn

from penjing.compress.distill.divergence import divergence_sum
from penjing.compress.distill.objective import DistillWeights
from penjing.compress.distill.task import WrappedTask
from penjing.compress.distill.training import Training, TrainingSettings, unused
from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import graph_config
from penjing.core.imports.user_code import user_function
from penjing.train.data.stream import OrderedStream, Stream
from penjing.train.families.base import Task
from penjing.train.families.graph import GraphTraining, laid_out, rebuilt
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED, Batch, Loss, TaskObjective
from penjing.train.objective.outputs import REAL, Classes, inputs_of
from penjing.train.processes.devices import choose_device
from penjing.train.processes.world import World
from penjing.train.recipe.data import SampleData
from penjing.train.recipe.recipe import RunRecipe
from penjing.train.sources.mix import MixedSamples

_MEASURED = 64  # samples that say how large the teacher's results are


def _known_loss(value: str) -> str:
    if value not in ("auto", "divergence", "mse", "cosine") and ".py:" not in value:
        raise ValueError("must be auto, divergence, mse, cosine or FILE.py:FUNCTION")
    return value


LossName = Annotated[str, AfterValidator(_known_loss)]


def samples(source: Path, step: TrainingSettings, data: DataSettings) -> SampleData:
    """The source of [data], augmented as the step says.

    Raises:
        ConfigError: settings of text, or no source.
    """
    wrong = unused(step, {"sources", "sequence_length", "document_mask", "held_out"})
    if wrong := [*wrong, *["adapter"] * (step.beside() is not None)]:
        raise ConfigError(f"{source} is a graph, which has no use for {', '.join(wrong)}; leave it out")
    if data.source is None:
        raise ConfigError(
            f"training {source} needs samples; set data.source (or data.images), such as a folder of photos"
        )
    return SampleData(
        kind="samples",
        batch_size=step.batch_size,
        micro_batch=step.micro_batch,
        pad=step.pad,
        flip=step.flip,
        erase=step.erase,
        scale=step.scale,
        colour=step.colour,
        mix=step.mixture(),
        held_out=data.held_out,
        **data.source_settings(),
    )


@dataclass(frozen=True)
class FromTeacher:
    """What a graph learns from the outputs of another; a sum over the samples, see `Objective`.

    Attributes:
        classes: what is learnt from the samples' own classes, and evaluated; None: they have none.
        loss: "divergence" of the softened classes, "mse", "cosine", or the user's own function.
        outputs: how many results of both are outputs; the others are features.
        keeps: the model learns in evaluation mode, with the statistics of batch norms that it has.
        scales: of each of the teacher's results the mean square, which squared errors are relative to; empty where
            none are taken. Measured once, and not of each batch, so that they do not depend on micro-batches.
    """

    teacher: nn.Module
    classes: Classes | None
    loss: str | Callable[..., Tensor]
    weights: DistillWeights
    temperature: float
    outputs: int
    keeps: bool = False
    scales: tuple[float, ...] = ()

    def count(self, batch: Batch) -> int:
        """See `Objective`: every sample that is not there to fill up a batch."""
        return int(batch[REAL].sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See `Objective`.

        Raises:
            InputError: the user's function gives something else than a loss for each sample.
        """
        inputs, real = inputs_of(batch), batch[REAL]
        learns = model.training
        if self.keeps and learns:
            model.eval()
        with torch.no_grad():
            taught = self.teacher(*inputs)
        seen = model(*inputs)
        model.train(learns)
        ours, theirs = seen[: self.outputs], taught[: self.outputs]
        parts: dict[str, tuple[float, Tensor]] = {}
        if self.weights.logits:
            name, value = self._outputs(ours, theirs, batch)
            parts[name] = (self.weights.logits, value)
        if self.weights.cross_entropy:
            value = cross_entropy_sum(ours[0], batch["targets"], ignored=IGNORED, label_smoothing=self._smoothing)
            parts["cross_entropy"] = (self.weights.cross_entropy, value)
        if self.weights.hidden:
            three = zip(seen[self.outputs :], taught[self.outputs :], self.scales[self.outputs :], strict=True)
            value = torch.stack([_summed(squared_errors(*each), real) for each in three]).mean()
            parts["hidden"] = (self.weights.hidden, value)
        metrics = {name: value.detach() for name, (_, value) in parts.items()}
        if ours[0].ndim == 2 and ours[0].shape[1] > 1:
            same = ours[0].detach().argmax(-1) == theirs[0].argmax(-1)
            metrics["agreement"] = (same & real).sum().to(torch.float32)
        return Loss(torch.stack([weight * value for weight, value in parts.values()]).sum(), metrics)

    @property
    def _smoothing(self) -> float:
        return 0.0 if self.classes is None else self.classes.label_smoothing

    def _outputs(self, ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], batch: Batch) -> tuple[str, Tensor]:
        real = batch[REAL]
        if self.loss == "divergence":
            return "divergence", divergence_sum(ours[0], theirs[0], real, self.temperature)
        if callable(self.loss):
            losses = self.loss(ours, theirs, batch["targets"])
            if not isinstance(losses, Tensor) or losses.shape != real.shape:
                raise InputError(
                    f"the loss of your own gave {tuple(getattr(losses, 'shape', ()))} values for {len(real)} samples; "
                    "it has to give a tensor with one for each"
                )
            return "own", _summed(losses, real)
        compared = [place for place, one in enumerate(ours) if one.is_floating_point()]
        losses = [
            squared_errors(ours[place], theirs[place], self.scales[place])
            if self.loss == "mse"
            else cosine_distances(ours[place], theirs[place])
            for place in compared
        ]
        return str(self.loss), torch.stack([_summed(each, real) for each in losses]).mean()

    def evaluation(self) -> TaskObjective:
        """Cross-entropy where the samples have classes, else the outputs beside the teacher's, not softened."""
        if self.classes is not None:
            return self.classes.evaluation()
        return replace(self, weights=DistillWeights(), temperature=1.0)


def _summed(losses: Tensor, real: Tensor) -> Tensor:
    return torch.where(real, losses, 0.0).sum()  # not losses[real]: shapes without data cannot be indexed so


def squared_errors(ours: Tensor, theirs: Tensor, scale: float) -> Tensor:
    """Of each sample the mean squared error of its numbers, relative to `scale`, (B,).

    Raises:
        InputError: of other shapes, or `scale` is no number: divided by infinity, all errors would be 0.
    """
    if not math.isfinite(scale):
        raise InputError("the teacher's results hold NaN or infinity; its weights or the data are damaged: check both")
    if ours.shape != theirs.shape:
        raise InputError(
            f"student and teacher give {tuple(ours.shape)} and {tuple(theirs.shape)} there; compare what has one shape"
        )
    return (ours - theirs).to(torch.float32).square().flatten(1).mean(1) / max(scale, 1e-12)


def cosine_distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Of each sample 1 - cosine of all its numbers, (B,)."""
    return 1 - F.cosine_similarity(ours.flatten(1).to(torch.float32), theirs.flatten(1).to(torch.float32), dim=1)


class Taught(WrappedTask):
    """`task`, learnt by `objective`.

    Args:
        mix: each sample is mixed with another, whose share is anything up to this; see `MixedSamples`.
    """

    def __init__(self, task: Task, objective: FromTeacher, mix: float = 0.0) -> None:
        super().__init__(task)
        self.objective: TaskObjective = objective
        self._mix = mix

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        stream = super().stream(micro_batch, world)
        if not self._mix:
            return stream
        assert isinstance(stream, OrderedStream)
        return OrderedStream(MixedSamples(stream.samples, self._mix, by_class=False), stream.order)


def taught_by_graph(task: Task, recipe: RunRecipe, student: Path, teacher: Path, step: Any) -> Task:
    """The task of a graph that learns from the graph in `teacher`, as a step `distill` says.

    Raises:
        ConfigError: a setting that graphs have no use for, or a loss that needs classes where there are none.
        InputError: student and teacher take or give different things.
    """
    assert isinstance(task, GraphTraining)
    if step.weights.cross_entropy and step.mix:
        raise ConfigError("a mixture of two samples has no class of its own; set weights.cross_entropy or mix to 0")
    return Taught(
        task,
        from_teacher(
            task,
            recipe,
            student,
            teacher,
            step.weights,
            step.temperature,
            step.loss,
            step.features,
            step.batch_norms == "keep",
        ),
        step.mix,
    )


def from_teacher(
    task: GraphTraining,
    recipe: RunRecipe,
    student: Path,
    teacher: Path,
    weights: DistillWeights,
    temperature: float = 1.0,
    loss: str = "auto",
    features: tuple[str, ...] = (),
    keeps: bool = False,
) -> FromTeacher:
    """The objective of `taught_by_graph`; `task` gives the results of `features` too from here on."""
    ours, theirs = graph_config(student), graph_config(teacher)
    if (ours.inputs, ours.outputs) != (theirs.inputs, theirs.outputs):
        raise InputError(
            f"{student} takes and gives {_said(ours)}, teacher {teacher} {_said(theirs)}; take a teacher with the same "
            "inputs and outputs"
        )
    if weights.relations:
        raise ConfigError("weights.relations is for decoders; use weights.hidden with features, nodes of the graph")
    if bool(weights.hidden) != bool(features):
        raise ConfigError("weights.hidden and features, the nodes that are compared, belong together; set both")
    if weights.cross_entropy and not task.labelled:
        raise ConfigError("weights.cross_entropy needs samples with classes, and these have none; set it to 0")
    divides = task.num_classes > 1
    if loss == "divergence" and not divides:
        raise ConfigError("loss = 'divergence' needs a first output of (batch, classes); use 'mse' or 'cosine'")
    chosen: Any = (
        user_function(loss) if ".py:" in loss else ("divergence" if divides else "mse") if loss == "auto" else loss
    )
    task.features = features
    network = load_network(teacher)
    device = choose_device(recipe.device)
    model = laid_out(rebuilt(network, features), device).to(device).eval().requires_grad_(False)
    Precision(model, PrecisionConfig(mode=recipe.precision.mode), device)
    classes = task.objective if task.labelled else None
    assert classes is None or isinstance(classes, Classes)
    scales = mean_squares(model, task, device) if chosen == "mse" or features else ()
    return FromTeacher(model, classes, chosen, weights, temperature, len(ours.outputs), keeps, scales)


@torch.no_grad()
def mean_squares(teacher: nn.Module, task: GraphTraining, device: torch.device) -> tuple[float, ...]:
    """The mean square of each of the teacher's results over the first samples of training, taken one at a time, as
    memory may hold no more."""
    found = [
        [
            result.to(torch.float64).square().mean()
            for result in teacher(*(each.to(device) for each in inputs_of(batch)))
        ]
        for batch in islice(task.stream(1, World()), _MEASURED)
    ]
    return tuple(torch.tensor(found, dtype=torch.float64).mean(0).tolist())


def _said(config: Any) -> str:
    return ", ".join(map(str, (*config.inputs, *config.outputs)))


TRAINING = Training(data=samples, evaluation_samples=10_000, taught=taught_by_graph)
