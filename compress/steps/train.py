"""The steps `distill` and `finetune`: a smaller network gets its quality back by training."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from penjing.compress.distill.features import AttentionRelations, HiddenStates
from penjing.compress.distill.graph import LossName
from penjing.compress.distill.objective import Distillation, DistillWeights, Matcher, Teacher
from penjing.compress.distill.respelled import Respelled
from penjing.compress.distill.task import Distilled
from penjing.compress.distill.training import Training, TrainingSettings, run_recipe_of, train_checkpoint, writer_of
from penjing.compress.families.base import Needs
from penjing.compress.steps.base import Context, Step
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.progress import Progress
from penjing.core.work import Places
from penjing.train.adapter.lora import AdapterConfig
from penjing.train.families.base import Task
from penjing.train.objective.objective import CrossEntropy
from penjing.train.processes.devices import choose_device
from penjing.train.recipe.recipe import RunRecipe

TRAINING, FORWARD = 3, 1  # passes' worth of multiply-accumulates


class TrainedStep(TrainingSettings, Step):
    """A step that trains."""

    remedy: ClassVar[str] = "train longer"

    adapter: AdapterConfig | None = Field(
        default=None,
        description="Small matrices (LoRA) that learn beside the frozen network of a decoder, in less than half of the "
        "memory; the step ends with their sum. None given: all weights learn.",
    )

    def beside(self) -> AdapterConfig | None:
        """See `TrainingSettings`."""
        return self.adapter

    def check(self, context: Context) -> None:
        """See `Step`."""
        training = context.family.need("training", "trained")
        run_recipe_of(context.model, self, training, context.data, context.model)

    def needs(self, size: dict[str, Any], context: Context) -> Needs:
        """See `Step`: weights, gradients and two moments in float32, and the teacher; activations come on top."""
        return training_needs(self, size, self.teacher_of(context.model) is not None)


def training_needs(step: TrainingSettings, size: dict[str, Any], taught: bool) -> Needs:
    """What training a network of `size` takes, with or without a teacher of the same size. Beside an adapter, which is
    not counted, a frozen network has neither gradients nor moments."""
    weights = 4 * size["parameters"]
    kept, passes = (4, TRAINING) if step.beside() is None else (1, TRAINING - FORWARD)
    samples = step.steps * step.batch_size * (step.sequence_length if size["macs_per"] == "token" else 1)
    return Needs(
        memory=weights * (kept + taught),
        disk=size["bytes"],
        scratch=kept * weights,
        macs=samples * (passes + taught * FORWARD) * size["macs"],
    )


class Finetune(TrainedStep):
    """Training on the data's own targets."""

    heals: ClassVar[bool] = True

    kind: Literal["finetune"] = Field(default="finetune", description="Learn from the data's own targets.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Of the cross-entropy.")
    mix: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Each image is mixed with another one, whose share is anything up to this, and learns the classes "
        "of both by their shares.",
    )

    def mixture(self) -> float:
        """See `TrainingSettings`."""
        return self.mix

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`."""
        training = context.family.need("training", "trained")
        return _trained(places, self, training, lambda task, _: task, {"student": places.source}, context)


class Distill(TrainedStep):
    """Training from a teacher's answers as well."""

    heals: ClassVar[bool] = True

    kind: Literal["distill"] = Field(default="distill", description="Learn from a teacher.")
    teacher: Path | None = Field(default=None, description="A checkpoint; none given: the recipe's model.")
    temperature: float = Field(default=1.0, gt=0, description="Divides the logits of teacher and student.")
    weights: DistillWeights = Field(default=DistillWeights(), description="Weights of the parts of the loss.")
    loss: LossName = Field(
        default="auto",
        description="What a graph's outputs are compared by (weights.logits): divergence (of classes), mse, cosine, or "
        "FILE.py:FUNCTION (of its outputs, the teacher's and the classes, which gives a loss for each sample). By "
        "default the divergence where the first output has classes, else mse.",
    )
    features: tuple[str, ...] = Field(
        default=(),
        description="Nodes of a graph whose results are compared too (weights.hidden); 'penjing graph' shows their "
        "names. Student and teacher need the same shapes there.",
    )
    mix: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="Each sample of a graph is mixed with another, whose share is anything up to this; "
        "teacher and student see the mixture.",
    )
    batch_norms: Literal["learn", "keep"] = Field(
        default="keep",
        description='Of a graph: "keep" trains with the statistics that there are, and drops nothing out, which is how '
        'the network will answer; "learn" measures each batch, for long trainings with large ones.',
    )
    relation_heads: int | None = Field(
        default=None, gt=0, description="Heads of weights.relations; none given: as many as fit."
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Of the cross-entropy.")
    cache_top_k: int | None = Field(
        default=None, gt=0, description="The teacher answers once, and so many logits a token are kept (decoders)."
    )
    cache_folder: Path | None = Field(default=None, description="Of all such caches; none given: penjing's own.")

    @model_validator(mode="after")
    def _fits_cache(self) -> Distill:
        if self.cache_top_k is not None and (self.weights.hidden or self.weights.relations or not self.weights.logits):
            raise ValueError(
                "cache_top_k keeps logits alone: set weights.hidden and weights.relations to 0, or drop it"
            )
        return self

    def check_order(self, before: tuple[Step, ...], after: tuple[Step, ...]) -> None:
        """See `Step`."""
        if self.teacher is None and not before:
            raise ConfigError(
                "nothing was changed before this distill, so that student and teacher are the same network; put it "
                "after a prune, name another teacher, or use kind = 'finetune'"
            )

    def check(self, context: Context) -> None:
        """See `Step`."""
        super().check(context)
        training = context.family.need("training", "trained")
        if training.taught is None and (self.loss != "auto" or self.features or self.mix or self.batch_norms != "keep"):
            raise ConfigError(
                f"loss, features, mix and batch_norms are for graphs, and {context.model} is none; leave them out"
            )
        if self.cache_top_k is not None and training.cached is None:
            raise ConfigError("cache_top_k is for decoders: images are cut anew in every epoch; leave it out")

    def teacher_of(self, model: Path) -> Path:
        """See `Step`."""
        return self.teacher or model

    def run(self, places: Places, context: Context) -> dict[str, Any]:
        """See `Step`."""
        teacher, training = self.teacher_of(context.model), context.family.need("training", "trained")

        def wrap(task: Task, recipe: RunRecipe) -> Task:
            if training.taught is not None:
                return training.taught(task, recipe, places.source, teacher, self)
            return self._objective(task, recipe, places.source, teacher, training, context.progress)

        names = {"student": places.source, "teacher": teacher}
        return _trained(places, self, training, wrap, names, context)

    def _objective(
        self, task: Task, recipe: RunRecipe, student: Path, teacher: Path, training: Training, progress: Progress
    ) -> Task:
        plain = task.objective.evaluation()
        assert isinstance(plain, CrossEntropy)
        assert training.teacher is not None
        assert training.architecture is not None
        plain = CrossEntropy(plain.inputs, self.label_smoothing, plain.accuracy)
        if self.cache_top_k is not None:
            if training.cached is None:
                raise ConfigError("cache_top_k is for decoders: images are cut anew in every epoch; leave it out")
            kept = (self.weights, self.temperature, self.cache_top_k, self.cache_folder)
            return training.cached(task, recipe, plain, student, teacher, self, *kept, progress)
        model = training.teacher(student, teacher, self)
        small, large = training.architecture(student), model.config
        assert isinstance(large, DecoderConfig | ResNetConfig)
        if isinstance(model, Respelled) and (self.weights.hidden or self.weights.relations):
            raise ConfigError(
                f"teacher {teacher} has more tokens than {student}, so that states do not compare place by place: "
                "set weights.hidden and weights.relations to 0"
            )
        matchers: list[tuple[Matcher, float]] = []
        projections = None
        if self.weights.hidden:
            hidden = HiddenStates(small, large)
            matchers.append((hidden, self.weights.hidden))
            projections = hidden.projections
        if self.weights.relations:
            matchers.append((AttentionRelations.between(small, large, self.relation_heads), self.weights.relations))
        names = tuple(name for matcher, _ in matchers for name in matcher.teacher)
        answers = Teacher(model, plain.inputs, choose_device(recipe.device), recipe.precision.mode, names)
        objective = Distillation(plain, answers, self.weights, self.temperature, tuple(matchers))
        return Distilled(task, objective, recipe.seed, projections)


def _trained(
    places: Places, step: TrainedStep, training: Training, wrap: Any, names: dict[str, Path], context: Context
) -> dict[str, Any]:
    names = names | writer_of(step, step.teacher_of(context.model) or context.model)
    paths = places.source, places.partial
    return train_checkpoint(*paths, step, training, context.data, places.scratch, context.progress, wrap, names)
