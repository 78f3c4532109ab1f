"""Training inside a compression run: train's loop on a checkpoint's own network and data, under any objective."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import nn

from penjing.compress.distill.objective import Distillation, DistillWeights, Teacher
from penjing.compress.distill.task import Distilled
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.named import code_file, learnt_files
from penjing.compress.samples.own import OWN, own_texts
from penjing.core.config import Config
from penjing.core.files import atomic_write_text, writing
from penjing.core.manifest import MANIFEST_NAME, identity, read_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.progress import Progress
from penjing.core.work import check_kept
from penjing.train.adapter.lora import AdapterConfig
from penjing.train.families.base import Task, build_checkpoint_task
from penjing.train.monitor.monitor import MonitorConfig
from penjing.train.numerics.precision import PrecisionConfig
from penjing.train.objective.objective import CrossEntropy
from penjing.train.optim.clip import ClipConfig
from penjing.train.optim.optimizer import OptimizerConfig
from penjing.train.optim.schedule import LearningRate
from penjing.train.processes.devices import choose_device
from penjing.train.processes.stop import InterruptedRunError
from penjing.train.recipe.data import FashionData, SampleData, SightData, TextData
from penjing.train.recipe.recipe import CheckpointConfig, EvaluationConfig, MemoryConfig, ObjectiveConfig, RunRecipe
from penjing.train.run import train_task
from penjing.train.sources.open import fingerprint

_KEY, _TRAINED, _RUN = "step.json", "trained", "run"
WRITER = "writer"


class TrainingSettings(Config):
    """What every step that trains is told: the run of train's loop, and its data."""

    steps: int = Field(gt=0, description="Updates of the weights.")
    batch_size: int = Field(default=64, gt=0, description="Samples of one update.")
    micro_batch: int | Literal["auto"] | None = Field(
        default=None, description='Samples of one forward pass; none given: all; "auto" takes the fastest that fits.'
    )
    seed: int = Field(default=0, ge=0, description="Seed of the order of samples.")
    device: str = Field(
        default="auto",
        description='Where the network learns: "cpu", the accelerator that torch finds, by its type, or "auto".',
    )
    learning_rate: LearningRate = Field(default=LearningRate(), description="Rate over the updates.")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="Which optimizer, and its settings.")
    clip: ClipConfig = Field(default=ClipConfig(), description="Bounds of gradients.")
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description="Number formats of products.")
    memory: MemoryConfig = Field(default=MemoryConfig(), description="What is computed again to save memory.")
    average: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of averaged weights, which become the result."
    )
    checkpoint_every: int = Field(default=200, ge=1, description="Updates between two states that a kill goes back to.")
    evaluation_samples: int | None = Field(
        default=None, ge=0, description="Held-out samples at the end; none given: 10 000 images or 256 sequences."
    )
    sources: tuple[str, ...] = Field(
        default=(),
        description="Text of a decoder: folders, files, builtin:calibration, builtin:prose, builtin:code, and "
        "builtin:own, texts that its teacher (else the recipe's model) writes, as [data.own_texts] says; of one that "
        "sees rows with images: JSON lines, Parquet, or builtin:scenes.",
    )
    images: Path = Field(
        default=Path(), description="Folder of the images that `sources` name, of a decoder that sees."
    )
    sequence_length: int = Field(default=256, gt=0, description="Tokens of a sample, of a decoder.")
    document_mask: bool = Field(default=False, description="Keep attention inside each document, of a decoder.")
    held_out: float = Field(default=0.02, gt=0, lt=1, description="Share of the text that is not learnt.")
    pad: int = Field(default=0, ge=0, description="Pixels around an image before it is cropped, of a classifier.")
    flip: bool = Field(default=False, description="Mirror half of the images.")
    erase: int = Field(default=0, ge=0, description="Side of a square that is erased from each image, in pixels.")
    scale: float = Field(default=1.0, gt=0, le=1, description="Least share of each image that is shown; 1: all of it.")
    colour: float = Field(
        default=0.0, ge=0, lt=1, description="Light, contrast and colours of images change by this share at most."
    )

    def mixture(self) -> float:
        """The largest share of another sample, with its class, in each that is learnt from."""
        return 0.0

    def beside(self) -> AdapterConfig | None:
        """The small matrices that learn beside the network, which is frozen; None: the network learns."""
        return None


@dataclass(frozen=True)
class Training:
    """How networks of a family learn.

    Attributes:
        data: (checkpoint, step, recipe's [data]) → the section of a training recipe; ConfigError for settings of other
            data.
        evaluation_samples: held-out samples where none are asked for.
        architecture: of a checkpoint, which hidden states of student and teacher are compared by.
        teacher: (student, teacher, settings) → the teacher's network in float32, once the student can learn from it.
        cached: fills a cache of the teacher's answers and gives the task that learns from it; None where samples
            differ from epoch to epoch.
        taught: (task, recipe, student, teacher, step) → the task that learns from the teacher, of a family that has its
            own way; None: by `architecture` and `teacher`, the way of networks that give logits.
    """

    data: Callable[[Path, TrainingSettings, DataSettings], TextData | FashionData | SampleData | SightData]
    evaluation_samples: int
    architecture: Callable[[Path], DecoderConfig | ResNetConfig] | None = None
    teacher: Callable[[Path, Path, TrainingSettings], nn.Module] | None = None
    cached: Callable[..., Task] | None = None
    taught: Callable[[Task, RunRecipe, Path, Path, Any], Task] | None = None


def train_checkpoint(
    source: Path,
    partial: Path,
    step: TrainingSettings,
    training: Training,
    data: DataSettings,
    work: Path,
    progress: Progress,
    wrap: Callable[[Task, RunRecipe], Task],
    names: dict[str, Path],
) -> dict[str, Any]:
    """Train the checkpoint `source` as `step` says and write the result into `partial`, complete with manifest.

    Args:
        partial: an existing folder, not yet published.
        training: of the checkpoint's family.
        data: the recipe's [data].
        work: a folder for this step alone: the run's checkpoints and metrics. After a kill, the same call goes on from
            there to the same result; for another step, other checkpoints or data it starts empty.
        wrap: (task of the checkpoint's own, recipe of the run) → the task that is trained.
        names: the checkpoints that the step reads, by role; the "writer" writes where "builtin:own" is a source and
            `data` names no other.

    Returns:
        A JSON record: settings, checkpoints, data, losses, evaluation, seconds.

    Raises:
        PenjingError: see `core.errors`; nothing is left under a final name.
    """
    began = time.perf_counter()
    recipe = run_recipe_of(source, step, training, data, work)
    if WRITER in names:
        names = names | {WRITER: data.own_texts.writer or names[WRITER]}
        recipe = _with_own_texts(recipe, own_texts(names[WRITER], data.own_texts, progress))
    _claim(work, step, recipe, data, names, progress)
    check_kept(work / _TRAINED)
    if not (work / _TRAINED / MANIFEST_NAME).is_file():
        try:
            train_task(
                recipe,
                lambda heard: wrap(build_checkpoint_task(source, recipe, heard), recipe),
                command="penjing compress",
                resume="auto",
                accept_changes=True,  # `_claim` has compared all that matters, checkpoints by content
                progress=progress,
                interim=True,
            )
        except InterruptedRunError as error:
            error.args = (f"{str(error).partition(';')[0]}; the same command goes on from there",)
            raise  # with the exit code of the signal
    with writing(partial):
        shutil.copytree(work / _TRAINED, partial, dirs_exist_ok=True)
    return {
        "kind": getattr(step, "kind", ""),
        "settings": step.model_dump(mode="json", exclude_unset=True),
        **{role: str(folder) for role, folder in names.items()},
        "data": list(step.sources) or [data.source or "Fashion-MNIST"],
        **_measured(work / _RUN / "metrics.jsonl"),
        "evaluation": read_manifest(partial).created_by["evaluation"],
        "seconds": time.perf_counter() - began,
    }


def writer_of(step: TrainingSettings, model: Path) -> dict[str, Path]:
    """The role of `model` for `train_checkpoint`, where the step learns from text that a model writes."""
    return {WRITER: model} if OWN in step.sources else {}


def _with_own_texts(recipe: RunRecipe, folder: Path) -> RunRecipe:
    assert isinstance(recipe.data, TextData)
    sources = tuple(str(folder) if source == OWN else source for source in recipe.data.sources)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sources": sources})})


def run_recipe_of(
    source: Path, step: TrainingSettings, training: Training, data: DataSettings, work: Path
) -> RunRecipe:
    """The run of a step: the seams of a training recipe, and the data that fits the checkpoint.

    Raises:
        ConfigError: settings of the other kind of data, or no text.
    """
    samples = training.evaluation_samples if step.evaluation_samples is None else step.evaluation_samples
    return RunRecipe(
        output=work / _TRAINED,
        run=work / _RUN,
        steps=step.steps,
        seed=step.seed,
        device=step.device,
        initial=source,
        adapter=step.beside(),
        average=step.average,
        data=training.data(source, step, data),
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


def taught(
    task: Task,
    run: RunRecipe,
    training: Training,
    student: Path,
    teacher: Path,
    step: TrainingSettings,
    weights: DistillWeights,
    temperature: float,
) -> Task:
    """`task`, which learns the teacher's logits too."""
    plain = task.objective.evaluation()
    assert isinstance(plain, CrossEntropy)
    assert training.teacher is not None
    network = training.teacher(student, teacher, step)
    answers = Teacher(network, plain.inputs, choose_device(run.device), run.precision.mode)
    return Distilled(task, Distillation(plain, answers, weights, temperature), run.seed)


def unused(step: TrainingSettings, names: set[str]) -> list[str]:
    """Those of the settings `names` that a step was given."""
    fields = type(step).model_fields
    return sorted(name for name in names if getattr(step, name) != fields[name].default)


def _claim(
    work: Path,
    step: TrainingSettings,
    recipe: RunRecipe,
    data: DataSettings,
    names: dict[str, Path],
    progress: Progress,
) -> None:
    """Make `work` the folder of this step on these checkpoints and data: what another left there goes."""
    facts = {"step": step.model_dump(mode="json"), **{role: identity(folder) for role, folder in names.items()}}
    images = step.images if isinstance(recipe.data, SightData) else None
    facts["files"] = learnt_files(step.sources, images, "sources") | code_file(getattr(step, "loss", ""))
    if WRITER in names:
        facts["own_texts"] = data.own_texts.model_dump(mode="json", exclude={"writer"})
    if data.source is not None:
        facts |= {"data": data.source_settings() | {"held_out": data.held_out}, "samples": fingerprint(data)}
    key = json.dumps(facts, sort_keys=True) + "\n"
    path = work / _KEY
    with writing(work):
        work.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.read_text(encoding="utf-8") != key:
            progress.note(f"{work} belongs to other settings, checkpoints or data; training starts from the beginning")
        if not path.is_file() or path.read_text(encoding="utf-8") != key:
            for name in (_TRAINED, _RUN):
                shutil.rmtree(work / name, ignore_errors=True)
            atomic_write_text(path, key)


def _measured(path: Path) -> dict[str, Any]:
    """First and last values of the loss and its parts, and the seconds of all steps, resumed or not."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if "loss" in record]
    parts = [
        key
        for key in ("loss", "divergence", "mse", "cosine", "own", "cross_entropy", "hidden", "relations")
        if key in records[0]
    ]
    seconds, before = 0.0, 0
    for record in records:
        seconds += (record["step"] - before) * record["step_s"]
        before = record["step"]
    ends = {"first": records[0], "last": records[-1]}
    return {
        "losses": {end: {part: record[part] for part in parts} for end, record in ends.items()},
        "training_seconds": seconds,
    }
