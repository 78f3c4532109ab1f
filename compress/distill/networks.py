"""Which student can learn from which teacher, and loading the teacher."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from penjing.compress.distill.respelled import is_respelled
from penjing.core.checkpoint.classifier import classifier_skeleton, load_classifier
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.models.decoder import Decoder
from penjing.core.progress import plural
from penjing.train.state.initial import checkpoint_weights, fill_weights
from penjing.train.state.state import check_finite


def classifier_teacher(student: Path, teacher: Path) -> nn.Module:
    """The teacher's network on the CPU in float32, once it is clear that the classifier `student` can learn from it.

    Raises:
        InputError: damaged, NaN in the weights, other classes or images, or narrower somewhere than the student; names
            the file or layer.
    """
    small, small_config = classifier_skeleton(student)
    model, config = load_classifier(teacher)
    for name in ("labels", "image_size", "mean", "std"):
        ours, theirs = getattr(small_config, name), getattr(config, name)
        if ours != theirs:
            raise InputError(
                f"{student} has {name} {ours}, teacher {teacher} {theirs}; a teacher needs the same classes and images"
            )
    check_finite(model.state_dict(), f"teacher = {teacher}")
    _check_widths(small, model, teacher)
    return model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def check_decoder(student: Path, teacher: Path, *, respelled: bool = False) -> Checkpoint:
    """The teacher, opened, if the decoder `student` can learn from it.

    Args:
        respelled: the student's tokens may be some of the teacher's, see `Respelled`.

    Raises:
        InputError: other tokens, or narrower or less deep somewhere than the student; names the layer.
    """
    small, large = open_checkpoint(student), open_checkpoint(teacher)
    if not (respelled and is_respelled(student, teacher)):
        if small.config.vocab_size != large.config.vocab_size:
            raise InputError(
                f"{student} has a vocabulary of {small.config.vocab_size}, teacher {teacher} of "
                f"{large.config.vocab_size}; logits compare token by token: take a teacher with the student's tokenizer"
            )
        if not same_tokens(student, teacher):
            raise InputError(
                f"{teacher / 'tokenizer.json'} is another tokenizer than that of {student}; logits compare token by "
                "token: take a teacher with the student's tokenizer"
            )
    with torch.device("meta"):
        _check_widths(Decoder(small.config), Decoder(large.config), teacher)
    return large


def decoder(checkpoint: Checkpoint) -> Decoder:
    """The network of an opened checkpoint in evaluation mode, float32, on the CPU.

    Raises:
        InputError: quantized, damaged, or NaN in the weights.
    """
    model = Decoder(checkpoint.config)
    fill_weights(model, checkpoint_weights(checkpoint.folder, role="teacher"))
    return model.eval()


def same_tokens(student: Path, teacher: Path) -> bool:
    """Whether the two have one vocabulary."""
    paths = student / "tokenizer.json", teacher / "tokenizer.json"
    ours, theirs = (read_json_object(path) for path in paths)
    return all(ours.get(key) == theirs.get(key) for key in ("model", "added_tokens"))


def _check_widths(student: nn.Module, teacher: nn.Module, folder: Path) -> None:
    """Compare layers of one kind, whatever their number, since pruned layers are counted anew."""
    widest: dict[str, tuple[int, ...]] = {}
    for name, parameter in teacher.named_parameters():
        kind = _kind(name)
        widest[kind] = tuple(map(max, widest.get(kind, parameter.shape), parameter.shape))
    for name, parameter in student.named_parameters():
        shape, limit = tuple(parameter.shape), widest.get(_kind(name))
        if limit is not None and any(ours > theirs for ours, theirs in zip(shape, limit, strict=True)):
            raise InputError(
                f"{name} of the student is {shape}, wider than in teacher {folder} (at most {limit}); a student is no "
                "wider than its teacher: swap them, or take a larger teacher"
            )
    ours, theirs = (_depth(model.named_modules()) for model in (student, teacher))
    if ours > theirs:
        raise InputError(
            f"the student has {plural(ours, 'layer')}, teacher {folder} {theirs}; take a teacher at least as deep"
        )


def _kind(name: str) -> str:
    return re.sub(r"(blocks|model\.layers)\.\d+", r"\1.N", name)


def _depth(modules: Iterable[tuple[str, nn.Module]]) -> int:
    return sum(1 for name, _ in modules if re.fullmatch(r"(blocks|model\.layers)\.\d+", name))
