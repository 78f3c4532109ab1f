"""How decoders learn inside a compression run: from text, and from a teacher that answers then or once before."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from penjing.compress.decoder.check import refuse_experts
from penjing.compress.decoder.stream import refuse_tokens
from penjing.compress.distill.cache import Answer, TeacherCache
from penjing.compress.distill.networks import check_decoder, decoder, same_tokens
from penjing.compress.distill.objective import Distillation, DistillWeights, Teacher
from penjing.compress.distill.respelled import Respelled
from penjing.compress.distill.task import Distilled
from penjing.compress.distill.training import Training, TrainingSettings, unused
from penjing.compress.samples.data import DataSettings
from penjing.core.cache import cache_dir
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import identity
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress
from penjing.train.adapter.lora import adapt
from penjing.train.families.base import Task
from penjing.train.families.decoder import LanguageModeling
from penjing.train.objective.objective import CrossEntropy
from penjing.train.processes.devices import choose_device
from penjing.train.recipe.data import TextData
from penjing.train.recipe.recipe import RunRecipe


def text(source: Path, step: TrainingSettings, _: DataSettings) -> TextData:
    """The step's `sources`, with the tokenizer of the checkpoint.

    Raises:
        ConfigError: no sources, settings of images, or an adapter that does not fit.
        InputError: a decoder with experts.
    """
    config = open_checkpoint(source).config
    refuse_experts(config, source, "training inside a compression run")
    refuse_tokens(config, source, "training inside a compression run")
    if not step.sources:
        raise ConfigError(f"{source} is a decoder: give the step sources = [folders of text], or 'builtin:code'")
    if wrong := [*unused(step, {"pad", "flip", "erase", "scale", "colour"}), *["mix"] * bool(step.mixture())]:
        raise ConfigError(f"{source} is a decoder, which has no use for {', '.join(wrong)}; leave it out")
    if (adapter := step.beside()) is not None:
        with torch.device("meta"):
            adapt(Decoder(config), adapter)
    return TextData(
        kind="text",
        batch_size=step.batch_size,
        micro_batch=step.micro_batch,
        sources=step.sources,
        tokenizer=source,
        sequence_length=step.sequence_length,
        document_mask=step.document_mask,
        held_out=step.held_out,
    )


def learn_from_cache(
    task: Task,
    recipe: RunRecipe,
    plain: CrossEntropy,
    student: Path,
    teacher: Path,
    step: TrainingSettings,
    weights: DistillWeights,
    temperature: float,
    top_k: int,
    folder: Path | None,
    progress: Progress,
) -> Task:
    """Distillation from the teacher's `top_k` largest logits, which are written first where they are not complete.

    Args:
        folder: of all such caches; None: in penjing's own cache.
    """
    assert isinstance(task, LanguageModeling)
    large = _fitting_teacher(student, teacher, step)
    cache = TeacherCache(
        base=folder or cache_dir() / "teacher",
        teacher=identity(teacher),
        shards=task.folder,
        sequence_length=step.sequence_length,
        document_mask=step.document_mask,
        top_k=min(top_k, open_checkpoint(student).config.vocab_size),
        temperature=temperature,
        mode=recipe.precision.mode,
    )
    device = choose_device(recipe.device)

    def load() -> Answer:
        answers = Teacher(_answering(student, large), plain.inputs, device, recipe.precision.mode)
        return lambda batch: answers({name: tensor.to(device) for name, tensor in batch.items()})[0]

    cache.fill(load, progress)
    objective = Distillation(plain, None, weights, temperature)
    return Distilled(task, objective, recipe.seed, cache=cache)


def _fitting_teacher(student: Path, teacher: Path, step: TrainingSettings) -> Checkpoint:
    large = check_decoder(student, teacher, respelled=True)
    if step.sequence_length > large.config.max_position_embeddings:
        raise ConfigError(
            f"sequence_length={step.sequence_length} is longer than the context of "
            f"{large.config.max_position_embeddings} tokens of teacher {teacher}; lower it"
        )
    return large


def _architecture(folder: Path) -> DecoderConfig:
    return open_checkpoint(folder).config


def _teacher(student: Path, teacher: Path, step: TrainingSettings) -> nn.Module:
    return _answering(student, _fitting_teacher(student, teacher, step))


def _answering(student: Path, teacher: Checkpoint) -> nn.Module:
    """The teacher's network, over the student's tokens."""
    network = decoder(teacher)
    return network if same_tokens(student, teacher.folder) else Respelled(network, student, teacher.folder)


TRAINING = Training(
    data=text,
    evaluation_samples=256,
    architecture=_architecture,
    teacher=_teacher,
    cached=learn_from_cache,
)
