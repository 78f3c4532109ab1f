"""`penjing compress sensitivity`: what each group of channels, heads or features costs in quality when it is pruned
alone.

What leaves is set to zero, which computes what its removal does, and put back afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import nn

from penjing.compress.families.base import family_at
from penjing.compress.measure.perplexity import evaluation_windows
from penjing.compress.prune.graph import Group, dependency_graph
from penjing.compress.prune.importance import Scores, magnitude, random
from penjing.compress.prune.ranking import select
from penjing.compress.prune.subject import Subject
from penjing.compress.prune.surgery import Selection, mask
from penjing.compress.samples.data import ImageData, TokenData
from penjing.compress.sensitivity.study import (
    Quality,
    Samples,
    Study,
    check_context,
    cut,
    sound,
    study_images,
)
from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.progress import Progress
from penjing.core.text.corpus import calibration_text, first_windows
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.work import WorkFolder


class Ratios(Config):
    """What is removed, and on which kind of samples the network is judged then."""

    ratios: tuple[float, ...] = Field(
        default=(0.1, 0.3, 0.5), min_length=1, description="Shares of a group's units that are removed, growing."
    )
    method: Literal["l1", "l2", "random"] = Field(default="l1", description="Which units go first.")
    data: Samples = Field(
        default="calibration",
        description='"calibration" images or text, so that the choice of what to prune does not see what is evaluated '
        'on; or "held-out" ones.',
    )
    seed: int = Field(default=0, ge=0, description='Decides what the method "random" removes.')

    @field_validator("ratios")
    @classmethod
    def _shares(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < value < 1 for value in values) or list(values) != sorted(set(values)):
            raise ValueError("each above 0 and below 1, growing: 0.1,0.3 removes 10 and then 30 % of a group's units")
        return values


class PruningSettings(Ratios):
    """How many samples a classifier or a decoder is judged on."""

    images: int = Field(default=512, ge=1, description="Images that a classifier is judged on.")
    windows: int = Field(default=8, ge=1, description="Windows of text that a decoder is judged on.")
    window: int = Field(default=256, ge=16, description="Tokens of a window.")


Judge = Callable[[nn.Module], dict[str, Any]]


def study_of(
    judge_of: Callable[[Path, PruningSettings, Progress], Judge],
    folder: Path,
    settings: PruningSettings,
    work: WorkFolder,
    progress: Progress,
) -> Study:
    judge = judge_of(folder, settings, progress)
    subject: Subject = family_at(folder).need("pruner", "pruned").open(folder, (), (), progress)
    progress.start("analysing the network", 1)
    groups = dependency_graph(subject.model, subject.example).groups
    quality: Quality = "accuracy" if subject.unit == "image" else "perplexity"
    return pruning_study(subject, groups, judge, quality, settings, work)


def pruning_study(
    subject: Subject, groups: Sequence[Group], judge: Judge, quality: Quality, settings: Ratios, work: WorkFolder
) -> Study:
    """Each of `groups` pruned alone; cells have `removed`, how many units left.

    Raises:
        InputError: there are no groups, or the network is damaged.
    """
    if not groups:
        raise InputError(f"{subject.folder}: nothing of this network can be pruned")
    scores = dict(zip((group.name for group in groups), _scores(subject, groups, settings), strict=True))
    named = {group.name: group for group in groups}
    model = subject.network()
    baseline = sound(subject.folder, work.run("baseline", lambda: judge(model)).result)

    def cell(name: str, ratio: float) -> dict[str, Any]:
        choice = select([named[name]], [scores[name]], ratio, round_to=1)
        found = baseline
        if choice:  # the share of a few units may be less than one
            with masked(model, choice):
                found = judge(model)
        removed = sum(len(units) for _, units in choice)
        more = {name: value for name, value in found.items() if name != "samples"}
        return {"removed": removed, **more, "loss": cut(found["loss"])}

    sizes = {name: len(group) for name, group in named.items()}
    return Study(quality, baseline, sizes, settings.ratios, cell, {})


def _scores(subject: Subject, groups: Sequence[Group], settings: Ratios) -> Scores:
    if settings.method == "random":
        return random(groups, settings.seed)
    return magnitude(subject.weights, groups, 1 if settings.method == "l1" else 2)


@contextmanager
def masked(model: nn.Module, selection: Selection) -> Iterator[None]:
    """Zeros in place of what `selection` would remove, inside the block; afterwards every bit is as before."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    touched = {place.tensor for group, _ in selection for place in group.places}
    saved = {name: tensors[name].detach().clone() for name in touched}
    try:
        mask(model, selection)
        yield
    finally:
        with torch.no_grad():
            for name, before in saved.items():
                tensors[name].copy_(before)


def _text(folder: Path, settings: PruningSettings) -> TokenData:
    check_context(folder, settings.window)
    tokens, tokenizer = settings.windows * settings.window, Tokenizer.from_folder(folder)
    if settings.data == "held-out":
        return TokenData(evaluation_windows(tokenizer, tokens, 0, settings.window)["prose"], 1)
    return TokenData(first_windows(tokenizer, calibration_text(), tokens, settings.window), 1)


@torch.no_grad()
def judge_text(data: TokenData, model: nn.Module) -> dict[str, Any]:
    """`value` (perplexity), `loss` (nats a token), `samples` (windows)."""
    loss, counted, samples = 0.0, 0, 0
    for (tokens,) in data.inputs():
        loss += float(model(tokens[:, :-1], targets=tokens[:, 1:]))
        counted += tokens[:, 1:].numel()
        samples += len(tokens)
    return {"value": math.exp(cut(loss / counted)), "loss": loss / counted, "samples": samples}


@torch.no_grad()
def judge_images(data: ImageData, model: nn.Module) -> dict[str, Any]:
    """`value` (accuracy), `loss` (nats an image), `samples` (images)."""
    loss, right, samples = 0.0, 0, 0
    labels = torch.from_numpy(data.images.labels.astype(np.int64)).split(data.batch)
    for (images,), targets in zip(data.inputs(), labels, strict=True):
        logits = model(images)
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(1) == targets).sum())
        samples += len(targets)
    return {"value": right / samples, "loss": loss / samples, "samples": samples}


def by_text(folder: Path, settings: PruningSettings, _: Progress) -> Judge:
    return partial(judge_text, _text(folder, settings))


def by_images(folder: Path, settings: PruningSettings, progress: Progress) -> Judge:
    return partial(judge_images, study_images(folder, settings.data, settings.images, progress))
