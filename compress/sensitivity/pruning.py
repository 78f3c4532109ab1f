"""`penjing compress sensitivity`: what each group of channels, heads or features costs in quality when it is pruned
alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import nn

from penjing.compress.decoder.check import input_hashes
from penjing.compress.measure.data import Calibrate, ImageData, TokenData, is_classifier, open_data
from penjing.compress.measure.perplexity import LARGEST_LOSS, evaluation_windows
from penjing.compress.prune.decoder_subject import DecoderSubject
from penjing.compress.prune.graph import Group, dependency_graph
from penjing.compress.prune.importance import Scores, magnitude, random
from penjing.compress.prune.ranking import select
from penjing.compress.prune.resnet_subject import ResNetSubject
from penjing.compress.prune.subject import Subject
from penjing.compress.prune.surgery import Selection, mask
from penjing.compress.sensitivity.pruning_page import sensitivity_page
from penjing.compress.sensitivity.study import Samples, about, measure_cells, run_study, study_images
from penjing.compress.work import WorkFolder
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.config import Config, key_of, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import verify
from penjing.core.progress import Progress, Silent
from penjing.core.text.tokenizer import Tokenizer


class SensitivitySettings(Config):
    """What is removed, and on what the network is judged then.

    `data`: "calibration" images or text, so that the choice of what to prune does not see what is evaluated on; or
    "held-out" ones.
    """

    ratios: tuple[float, ...] = Field(default=(0.1, 0.3, 0.5), min_length=1)
    method: Literal["l1", "l2", "random"] = "l1"
    data: Samples = "calibration"
    images: int = Field(default=512, ge=1)
    windows: int = Field(default=8, ge=1)
    window: int = Field(default=256, ge=16)  # tokens
    seed: int = Field(default=0, ge=0)  # of method "random"

    @field_validator("ratios")
    @classmethod
    def _shares(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < value < 1 for value in values) or list(values) != sorted(set(values)):
            raise ValueError("each above 0 and below 1, growing: 0.1,0.3 removes 10 and then 30 % of a group's units")
        return values


def settings_of(values: dict[str, Any]) -> SensitivitySettings:
    """The settings that flags amount to; `ratios` as "0.1,0.3".

    Raises:
        ConfigError: a value out of range.
    """
    try:
        ratios = [float(text) for text in values["ratios"].split(",")]
    except ValueError:
        raise ConfigError(f"--ratios {values['ratios']}: write numbers with commas, as 0.1,0.3,0.5") from None
    return parse_config(SensitivitySettings, values | {"ratios": ratios}, "sensitivity")


def sensitivity(
    folder: Path,
    settings: SensitivitySettings | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Prune one group after the other, by each ratio, and measure; nothing is healed in between.

    What leaves is set to zero, which computes what its removal does, and put back afterwards. Each measured cell is
    kept beside `out` until all are there, so that a killed run goes on.

    Args:
        folder: a checkpoint of a classifier or a decoder.
        out: the folder to make, with sensitivity.json and sensitivity.html; FOLDER-sensitivity when left out.
        force: replace what other settings or another checkpoint made.

    Returns:
        The content of sensitivity.json: `quality` ("accuracy" or "perplexity"), `baseline` {value, loss, samples},
        `groups` [{name, units, cells: [{ratio, removed (units), value, loss (nats)}]}], and what made it.

    Raises:
        ConfigError: windows longer than the model's context, more text than there is.
        InputError: the checkpoint is damaged or cannot be analysed; `out` holds something else.
        SetupError: no permission, no space, another process works on the same output.
    """
    settings, progress = settings or SensitivitySettings(), progress or Silent()
    out = out or folder.with_name(f"{folder.resolve().name}-sensitivity")
    hashes = verify(folder).sha256 if is_classifier(folder) else input_hashes(open_checkpoint(folder))
    key = key_of(settings.model_dump(mode="json"), hashes, f"{version('penjing')}/pruning/2")

    def measure(work: WorkFolder) -> dict[str, Any]:
        return _Study(folder, settings, work, progress).run() | about(folder, settings)

    return run_study(out, key, measure, sensitivity_page, force=force, progress=progress)


@dataclass
class _Study:
    folder: Path
    settings: SensitivitySettings
    work: WorkFolder
    progress: Progress

    def run(self) -> dict[str, Any]:
        settings, progress = self.settings, self.progress
        data = _data(self.folder, settings, progress)
        subject = _subject(self.folder, progress)
        progress.start("analysing the network", 1)
        groups = dependency_graph(subject.model, subject.example).groups
        if not groups:
            raise InputError(f"{self.folder}: nothing of this network can be pruned")
        scores = _scores(subject, groups, settings)
        model = subject.network()
        baseline = self.work.run("baseline", lambda: _judge(model, data, self.folder)).result
        num_cells = len(groups) * len(settings.ratios)
        progress.note(
            f"{self.folder}: {len(groups)} groups, {num_cells} cells of {baseline['samples']} samples each, kept in "
            f"{self.work.path.name} until all are measured ({self.work.num_resumed} are there)"
        )
        cells = {
            f"cell_{number:04d}_{ratio:g}": self._cell(model, group, values, ratio, data, baseline)
            for number, (group, values) in enumerate(zip(groups, scores, strict=True))
            for ratio in settings.ratios
        }
        results = iter(measure_cells(self.work, f"pruning {len(groups)} groups one by one", cells, progress))
        rows = [
            {"name": group.name, "units": len(group), "cells": [next(results) for _ in settings.ratios]}
            for group in groups
        ]
        quality = "accuracy" if isinstance(data, ImageData) else "perplexity"
        return {"quality": quality, "baseline": baseline, "groups": rows}

    def _cell(
        self,
        model: nn.Module,
        group: Group,
        values: NDArray[Any],
        ratio: float,
        data: ImageData | TokenData,
        baseline: dict[str, Any],
    ) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            choice = select([group], [values], ratio, round_to=1)
            found = baseline
            if choice:  # the share of a few units may be less than one
                with masked(model, choice):
                    found = _judge(model, data, self.folder, limit=False)
            removed = sum(len(units) for _, units in choice)
            return {"ratio": ratio, "removed": removed, "value": found["value"], "loss": found["loss"]}

        return measure


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


def _subject(folder: Path, progress: Progress) -> Subject:
    return ResNetSubject(folder) if is_classifier(folder) else DecoderSubject(folder, (), (), progress)


def _scores(subject: Subject, groups: Sequence[Group], settings: SensitivitySettings) -> Scores:
    if settings.method == "random":
        return random(groups, settings.seed)
    return magnitude(subject.weights, groups, 1 if settings.method == "l1" else 2)


def _data(folder: Path, settings: SensitivitySettings, progress: Progress) -> ImageData | TokenData:
    tokens, held_out = settings.windows * settings.window, settings.data == "held-out"
    if is_classifier(folder):
        return study_images(folder, settings.data, settings.images, progress)
    if held_out:
        context = open_checkpoint(folder).config.max_position_embeddings
        if settings.window > context:
            raise ConfigError(f"window={settings.window} is longer than the context of {folder}, {context} tokens")
        return TokenData(evaluation_windows(Tokenizer.from_folder(folder), tokens, 0, settings.window)["prose"], 1)
    calibrate = Calibrate(tokens=tokens, window=settings.window, batch_windows=1)
    data = open_data(folder, calibrate, progress)
    assert isinstance(data, TokenData)
    return data


@torch.no_grad()
def _judge(model: nn.Module, data: ImageData | TokenData, folder: Path, *, limit: bool = True) -> dict[str, Any]:
    """`value` (accuracy or perplexity), `loss` (nats an image or token), `samples` (images or windows).

    Raises:
        InputError: with `limit`, the loss is beyond what a sound network has; else it is cut to that.
    """
    loss, right, counted, samples = 0.0, 0, 0, 0
    if isinstance(data, ImageData):
        labels = torch.from_numpy(data.images.labels.astype(np.int64)).split(data.batch)
        for (images,), targets in zip(data.inputs(), labels, strict=True):
            logits = model(images)
            loss += float(F.cross_entropy(logits, targets, reduction="sum"))
            right += int((logits.argmax(1) == targets).sum())
            counted += len(targets)
        samples = counted
    else:
        for (tokens,) in data.inputs():
            loss += float(model(tokens[:, :-1], targets=tokens[:, 1:]))
            counted += tokens[:, 1:].numel()
            samples += len(tokens)
    mean = loss / counted
    if not mean < LARGEST_LOSS:  # NaN too
        if limit:
            raise InputError(f"{folder} has a loss of {mean:.3g}: it is damaged, or its training diverged")
        mean = LARGEST_LOSS
    value = right / counted if isinstance(data, ImageData) else math.exp(mean)
    return {"value": value, "loss": mean, "samples": samples}
