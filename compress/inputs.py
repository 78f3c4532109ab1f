"""The folders that a run reads, whole and hashed before it begins, and whether the steps fit them."""

from __future__ import annotations

from pathlib import Path

from penjing.compress.decoder import check as preflight
from penjing.compress.measure.data import is_classifier
from penjing.compress.recipe import Distill, FlowRecipe, Prune, Quantize, Sparsify
from penjing.compress.steps.distill import check_training
from penjing.compress.steps.kinds import decoder_step, teacher_of
from penjing.compress.steps.quantize_decoder import check_decoder_step
from penjing.core.checkpoint.classifier import classifier_skeleton
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import verify


def input_hashes(recipe: FlowRecipe) -> dict[str, dict[str, str]]:
    """SHA-256 of the files of the model ("model") and of each other teacher (its path); tensors' names and shapes are
    checked on the way.

    Raises:
        ConfigError: a teacher of another kind of network.
        InputError: missing, damaged, quantized already, or of another kind.
    """
    found = {"model": folder_hashes(recipe.model)}
    for place, step in enumerate(recipe.steps):
        teacher = teacher_of(step, recipe) if isinstance(step, Distill | Quantize) else None
        if teacher is None or teacher == recipe.model:
            continue
        found[str(teacher)] = folder_hashes(teacher)
        if is_classifier(teacher) != is_classifier(recipe.model):
            raise ConfigError(
                f"steps.{place}.teacher={teacher} is another kind of network than {recipe.model}; name one of its kind"
            )
    return found


def check_fit(recipe: FlowRecipe) -> None:
    """What a later step would refuse after hours of earlier ones.

    Raises:
        ConfigError: the output would replace the model, or a step is told what another kind of network needs.
    """
    if recipe.output.resolve() == recipe.model.resolve():
        raise ConfigError(f"output = {recipe.output} is the model itself; choose another output")
    classifier = is_classifier(recipe.model)
    for place, step in enumerate(recipe.steps):
        if classifier and isinstance(step, Prune | Sparsify) and step.parts is not None:
            raise ConfigError(
                f"steps.{place}.parts={list(step.parts)}: decoders have parts, {recipe.model} is a classifier; "
                "leave them out"
            )
        if isinstance(step, Quantize) and not classifier:
            try:
                check_decoder_step(recipe.model, decoder_step(step))
            except ConfigError as error:
                raise ConfigError(f"steps.{place}: {error}") from None
        if isinstance(step, Quantize) and classifier and step.int8 is not None:
            raise ConfigError(f"steps.{place}.int8 is for decoders, {recipe.model} is a classifier; leave it out")
        if isinstance(step, Prune) or not step.steps:
            continue
        try:
            check_training(recipe.model, step)
        except ConfigError as error:
            raise ConfigError(f"steps.{place}: {error}") from None


def folder_hashes(folder: Path) -> dict[str, str]:
    """Of the files that a checkpoint consists of.

    Raises:
        InputError: missing, damaged, quantized already, or of another kind.
    """
    if folder.is_dir() and is_classifier(folder):
        classifier_skeleton(folder)
        return verify(folder).sha256
    checkpoint = open_checkpoint(folder)
    preflight.check_model(checkpoint)
    return preflight.input_hashes(checkpoint)
