"""The pipeline's steps `distill` and `finetune`: a smaller network gets its accuracy back by training."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from penjing.compress.distill.cache import Answer, TeacherCache
from penjing.compress.distill.features import AttentionRelations, HiddenStates
from penjing.compress.distill.networks import check_decoder, decoder, identity, load_teacher
from penjing.compress.distill.objective import Distillation, DistillWeights, Matcher, Teacher
from penjing.compress.distill.task import Distilled
from penjing.compress.measure.data import is_classifier
from penjing.compress.work import check_kept
from penjing.core.cache import cache_dir
from penjing.core.checkpoint.classifier import ClassifierConfig, classifier_config
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.core.files import atomic_write_text, writing
from penjing.core.manifest import MANIFEST_NAME, read_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.progress import Progress
from penjing.train.families.base import Task
from penjing.train.families.classifier import ImageClassification
from penjing.train.families.decoder import LanguageModeling
from penjing.train.loop import InterruptedRunError
from penjing.train.monitor.monitor import MonitorConfig
from penjing.train.numerics.precision import PrecisionConfig
from penjing.train.objective.objective import CrossEntropy
from penjing.train.optim.clip import ClipConfig
from penjing.train.optim.optimizer import OptimizerConfig
from penjing.train.optim.schedule import LearningRate
from penjing.train.processes.world import choose_device
from penjing.train.recipe.data import FashionData, TextData
from penjing.train.recipe.recipe import CheckpointConfig, EvaluationConfig, MemoryConfig, ObjectiveConfig, RunRecipe
from penjing.train.run import train_task

_KEY, _TRAINED, _RUN = "step.json", "trained", "run"


class TrainingStep(Config):
    """What every step that trains is told: the run of train's loop, and its data.

    A decoder learns from text `sources` (folders, files, builtin:prose, builtin:code; the texts that
    `penjing generate --samples` writes are such a folder) with the tokenizer of its own checkpoint; a classifier from
    Fashion-MNIST, cropped after `pad`, flipped, `erase`d.
    """

    steps: int = Field(gt=0)
    batch_size: int = Field(default=64, gt=0)
    micro_batch: int | Literal["auto"] | None = None
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    learning_rate: LearningRate = LearningRate()
    optimizer: OptimizerConfig = OptimizerConfig()
    clip: ClipConfig = ClipConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    average: float | None = Field(default=None, gt=0, lt=1)  # decay of averaged weights, which become the result
    checkpoint_every: int = Field(default=200, ge=1)
    evaluation_samples: int | None = Field(default=None, ge=0)  # at the end; None: 10 000 images or 256 sequences
    sources: tuple[str, ...] = ()
    sequence_length: int = Field(default=256, gt=0)
    document_mask: bool = False
    held_out: float = Field(default=0.02, gt=0, lt=1)
    pad: int = Field(default=0, ge=0)
    flip: bool = False
    erase: int = Field(default=0, ge=0)


class DistillStep(TrainingStep):
    """`distill`: learn from a teacher (`weights`, `temperature`); `finetune`: from the data's targets alone."""

    kind: Literal["distill", "finetune"]
    temperature: float = Field(default=1.0, gt=0)
    weights: DistillWeights = DistillWeights()
    relation_heads: int | None = Field(default=None, gt=0)  # of weights.relations; None: as many as fit
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)  # of the cross-entropy
    cache_top_k: int | None = Field(default=None, gt=0)  # decoders: the teacher answers once, see cache.py
    cache_folder: Path | None = None  # of all such caches; None: in penjing's cache

    @model_validator(mode="after")
    def _fits_kind(self) -> DistillStep:
        if self.kind == "finetune" and (self.weights != DistillWeights() or self.temperature != 1.0):
            raise ValueError("finetune has no teacher: leave out weights and temperature, or write kind = 'distill'")
        if self.cache_top_k is not None and (self.weights.hidden or self.weights.relations or not self.weights.logits):
            raise ValueError(
                "cache_top_k keeps logits alone: set weights.hidden and weights.relations to 0, or drop it"
            )
        return self


def distill_checkpoint(
    student: Path, teacher: Path | None, partial: Path, step: DistillStep, work: Path, progress: Progress
) -> dict[str, Any]:
    """Train the checkpoint `student` as `step` says and write the result into `partial`, complete with manifest.

    Args:
        teacher: a checkpoint folder; None for finetune.
        partial: an existing folder, not yet published.
        work: a folder for this step alone: the run's checkpoints and metrics. After a kill, the same call goes on from
            there to the same result; for another step, student or teacher it starts empty.

    Returns:
        A JSON record: settings, teacher, data, losses, evaluation, seconds.

    Raises:
        PenjingError: see `core.errors`; nothing is left under a final name.
    """
    if (teacher is None) == (step.kind == "distill"):
        raise ConfigError(
            f"kind = {step.kind!r} {'needs a teacher: name its checkpoint' if teacher is None else 'takes no teacher'}"
        )
    names = {"student": student} | ({} if teacher is None else {"teacher": teacher})

    def build(task: Task, recipe: RunRecipe) -> Task:
        return task if teacher is None else _distilled(task, recipe, student, teacher, step, progress)

    return train_checkpoint(student, partial, step, work, progress, build, names)


def train_checkpoint(
    source: Path,
    partial: Path,
    step: TrainingStep,
    work: Path,
    progress: Progress,
    wrap: Any,
    names: dict[str, Path],
) -> dict[str, Any]:
    """`distill_checkpoint` for any objective.

    Args:
        wrap: (task of the checkpoint's own, recipe of the run) → the task that is trained.
        names: the checkpoints that the step reads, by role.
    """
    began = time.perf_counter()
    recipe = _recipe(source, step, work)
    _claim(work, step, names, progress)
    check_kept(work / _TRAINED)
    if not (work / _TRAINED / MANIFEST_NAME).is_file():
        try:
            train_task(
                recipe,
                lambda heard: wrap(_own_task(source, recipe, heard), recipe),
                command="penjing compress",
                resume="auto",
                progress=progress,
            )
        except InterruptedRunError as error:
            raise InterruptedRunError(f"{str(error).partition(';')[0]}; the same command goes on from there") from None
    with writing(partial):
        shutil.copytree(work / _TRAINED, partial, dirs_exist_ok=True)
    return {
        "kind": getattr(step, "kind", ""),
        "settings": step.model_dump(mode="json", exclude_unset=True),
        **{role: str(folder) for role, folder in names.items()},
        "data": list(step.sources) or ["Fashion-MNIST"],
        **_measured(work / _RUN / "metrics.jsonl"),
        "evaluation": read_manifest(partial).created_by["evaluation"],
        "seconds": time.perf_counter() - began,
    }


def check_training(source: Path, step: TrainingStep) -> None:
    """Refuse settings that do not fit the network in `source`, before anything is done.

    Raises:
        ConfigError: settings of the other kind of data, or no text.
    """
    _recipe(source, step, source)


def _recipe(source: Path, step: TrainingStep, work: Path) -> RunRecipe:
    """The run of a step: the seams of a training recipe, and the data that fits the checkpoint.

    Raises:
        ConfigError: settings of the other kind of data, or no text.
    """
    sizes = {"batch_size": step.batch_size, "micro_batch": step.micro_batch}
    given = {name for name, field in type(step).model_fields.items() if getattr(step, name) != field.default}
    if vision := is_classifier(source):
        wrong = given & {"sources", "sequence_length", "document_mask", "held_out"}
        data: TextData | FashionData = FashionData(
            kind="fashion-mnist", **sizes, pad=step.pad, flip=step.flip, erase=step.erase
        )
    else:
        wrong = given & {"pad", "flip", "erase"}
        data = TextData(
            kind="text",
            **sizes,
            sources=step.sources,
            tokenizer=source,
            sequence_length=step.sequence_length,
            document_mask=step.document_mask,
            held_out=step.held_out,
        )
        if not step.sources:
            raise ConfigError(f"{source} is a decoder: give the step sources = [folders of text], or 'builtin:code'")
    if wrong:
        kind = "an image classifier" if vision else "a decoder"
        raise ConfigError(f"{source} is {kind}, which has no use for {', '.join(sorted(wrong))}; leave it out")
    samples = step.evaluation_samples
    if samples is None:
        samples = 10_000 if vision else 256
    return RunRecipe(
        output=work / _TRAINED,
        run=work / _RUN,
        steps=step.steps,
        seed=step.seed,
        device=step.device,
        initial=source,
        average=step.average,
        data=data,
        objective=ObjectiveConfig(label_smoothing=getattr(step, "label_smoothing", 0.0)),
        optimizer=step.optimizer.model_copy(update={"no_decay": (*step.optimizer.no_decay, "distill_projections.*")}),
        learning_rate=step.learning_rate,
        clip=step.clip,
        precision=step.precision,
        memory=step.memory,
        checkpoint=CheckpointConfig(every=step.checkpoint_every, keep=2),
        evaluation=EvaluationConfig(every=step.steps if samples else 0, samples=samples or 1),
        monitor=MonitorConfig(every=max(1, step.steps // 100), tensorboard=False),
    )


def _own_task(source: Path, recipe: RunRecipe, progress: Progress) -> Task:
    config = classifier_config(source) if is_classifier(source) else open_checkpoint(source).config
    if isinstance(config, ClassifierConfig) and isinstance(recipe.data, FashionData):
        return ImageClassification(recipe, config, recipe.data, progress)
    assert isinstance(config, DecoderConfig)
    assert isinstance(recipe.data, TextData)
    return LanguageModeling(recipe, config, recipe.data, progress)


def _distilled(
    task: Task, recipe: RunRecipe, student: Path, teacher: Path, step: DistillStep, progress: Progress
) -> Task:
    plain = task.objective.evaluation()
    assert isinstance(plain, CrossEntropy)
    plain = CrossEntropy(plain.inputs, step.label_smoothing, plain.accuracy)
    if step.cache_top_k is not None:
        return _cached(task, recipe, plain, student, teacher, step, progress)
    model = load_teacher(student, teacher)
    small = classifier_config(student).model if is_classifier(student) else open_checkpoint(student).config
    large = model.config
    assert isinstance(large, DecoderConfig | ResNetConfig)
    if isinstance(large, DecoderConfig):
        _check_context(step, large, teacher)
    matchers: list[tuple[Matcher, float]] = []
    projections = None
    if step.weights.hidden:
        hidden = HiddenStates(small, large)
        matchers.append((hidden, step.weights.hidden))
        projections = hidden.projections
    if step.weights.relations:
        matchers.append((AttentionRelations.between(small, large, step.relation_heads), step.weights.relations))
    names = tuple(name for matcher, _ in matchers for name in matcher.teacher)
    answers = Teacher(model, plain.inputs, choose_device(recipe.device), recipe.precision.mode, names)
    objective = Distillation(plain, answers, step.weights, step.temperature, tuple(matchers))
    return Distilled(task, objective, recipe.seed, projections)


def _cached(
    task: Task,
    recipe: RunRecipe,
    plain: CrossEntropy,
    student: Path,
    teacher: Path,
    step: DistillStep,
    progress: Progress,
) -> Task:
    """Distillation from the teacher's cache, which is filled first where it is not complete."""
    if not isinstance(task, LanguageModeling) or is_classifier(teacher):
        raise ConfigError("cache_top_k is for decoders: images are cut anew in every epoch; leave it out")
    large = check_decoder(student, teacher)
    _check_context(step, large.config, teacher)
    assert step.cache_top_k is not None
    cache = TeacherCache(
        base=step.cache_folder or cache_dir() / "teacher",
        teacher=identity(teacher),
        shards=task.folder,
        sequence_length=step.sequence_length,
        document_mask=step.document_mask,
        top_k=min(step.cache_top_k, large.config.vocab_size),
        temperature=step.temperature,
        mode=recipe.precision.mode,
    )
    device = choose_device(recipe.device)

    def load() -> Answer:
        answers = Teacher(decoder(large), plain.inputs, device, recipe.precision.mode)
        return lambda batch: answers({name: tensor.to(device) for name, tensor in batch.items()})[0]

    cache.fill(load, progress)
    objective = Distillation(plain, None, step.weights, step.temperature)
    return Distilled(task, objective, recipe.seed, cache=cache)


def _check_context(step: DistillStep, config: DecoderConfig, teacher: Path) -> None:
    if step.sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"sequence_length={step.sequence_length} is longer than the context of {config.max_position_embeddings} "
            f"tokens of teacher {teacher}; lower it"
        )


def _claim(work: Path, step: TrainingStep, names: dict[str, Path], progress: Progress) -> None:
    """Make `work` the folder of this step on these checkpoints: what another left there goes."""
    facts = {"step": step.model_dump(mode="json"), **{role: identity(folder) for role, folder in names.items()}}
    key = json.dumps(facts, sort_keys=True) + "\n"
    path = work / _KEY
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.read_text(encoding="utf-8") != key:
            progress.note(f"{work} belongs to other settings or checkpoints; training starts from the beginning")
        if not path.is_file() or path.read_text(encoding="utf-8") != key:
            for name in (_TRAINED, _RUN):
                shutil.rmtree(work / name, ignore_errors=True)
            atomic_write_text(path, key)


def _measured(path: Path) -> dict[str, Any]:
    """First and last values of the loss and its parts, and the seconds of all steps, resumed or not."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if "loss" in record]
    parts = [key for key in ("loss", "divergence", "cross_entropy", "hidden", "relations") if key in records[0]]
    seconds, before = 0.0, 0
    for record in records:
        seconds += (record["step"] - before) * record["step_s"]
        before = record["step"]
    ends = {"first": records[0], "last": records[-1]}
    return {
        "losses": {end: {part: record[part] for part in parts} for end, record in ends.items()},
        "training_seconds": seconds,
    }
