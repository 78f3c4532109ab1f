"""`penjing compress sensitivity`: what each group of channels, heads or features costs in quality when it is pruned
alone."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import nn

from penjing.compress.data import Calibrate, ImageData, TokenData, fitting_images, is_classifier, open_data
from penjing.compress.perplexity import LARGEST_LOSS, evaluation_windows
from penjing.compress.preflight import input_hashes
from penjing.compress.prune.decoder_subject import DecoderSubject
from penjing.compress.prune.graph import Group, dependency_graph
from penjing.compress.prune.importance import Scores, magnitude, random
from penjing.compress.prune.ranking import select
from penjing.compress.prune.resnet_subject import ResNetSubject
from penjing.compress.prune.subject import Subject
from penjing.compress.prune.surgery import Selection, mask
from penjing.compress.sensitivity_page import sensitivity_page
from penjing.compress.steps import WorkFolder
from penjing.core.checkpoint import open_checkpoint
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.info import processor, versions
from penjing.core.manifest import read_json_object, verify
from penjing.core.progress import Progress, Silent, clock
from penjing.core.tokenizer import Tokenizer
from penjing.core.vision_checkpoint import vision_config

RESULT_FILE, PAGE_FILE = "sensitivity.json", "sensitivity.html"
SCHEMA_VERSION = 1


class SensitivitySettings(Config):
    """What is removed, and on what the network is judged then.

    `data`: "calibration" images or text, so that the choice of what to prune does not see what is evaluated on; or
    "held-out" ones.
    """

    ratios: tuple[float, ...] = Field(default=(0.1, 0.3, 0.5), min_length=1)
    method: Literal["l1", "l2", "random"] = "l1"
    data: Literal["calibration", "held-out"] = "calibration"
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
    what = {"settings": settings.model_dump(mode="json"), "input": hashes, "code": f"{version('penjing')}/1"}
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    if (done := _already(out, key, force)) is not None:
        progress.note(f"{out} is already done: kept (--force makes it again)")
        return done
    with WorkFolder(out, key) as work:
        result = _Study(folder, settings, work, progress).run() | {"key": key}
        with publish_folder(out, replace=force, marker=RESULT_FILE) as partial:
            atomic_write_text(partial / RESULT_FILE, json.dumps(result, indent=2) + "\n")
            atomic_write_text(partial / PAGE_FILE, sensitivity_page(result))
        work.remove()
    return result


def _already(out: Path, key: str, force: bool) -> dict[str, Any] | None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())) or force:
        return None
    if not (out / RESULT_FILE).is_file():
        raise InputError(f"{out} exists and holds no {RESULT_FILE}, so it is not replaced; choose another --out")
    found = read_json_object(out / RESULT_FILE)
    if found.get("key") != key:
        raise InputError(f"{out} was made from another checkpoint or settings; replace it with --force, or set --out")
    return found


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
        rows: list[dict[str, Any]] = []
        cells = [
            (group, values, ratio) for group, values in zip(groups, scores, strict=True) for ratio in settings.ratios
        ]
        progress.note(
            f"{self.folder}: {len(groups)} groups, {len(cells)} cells of {baseline['samples']} samples each, kept in "
            f"{self.work.path.name} until all are measured ({self.work.num_resumed} are there)"
        )
        progress.start(f"pruning {len(groups)} groups one by one", len(cells))
        remaining = _Remaining(len(cells))
        for number, (group, values, ratio) in enumerate(cells):
            if number % len(settings.ratios) == 0:
                rows.append({"name": group.name, "units": len(group), "cells": []})
            name = f"cell_{number // len(settings.ratios):04d}_{ratio:g}"
            is_kept = self.work.record(name) is not None
            choice = select([group], [values], ratio, round_to=1)
            removed = sum(len(units) for _, units in choice)
            with remaining.timed(is_kept):
                cell = self.work.run(name, lambda choice=choice: self._cell(model, choice, data, baseline))
            rows[-1]["cells"].append({"ratio": ratio, "removed": removed, **cell.result})
            progress.advance()
            progress.status(f"{number + 1} of {len(cells)} cells, left {remaining}")
        return {
            "schema_version": SCHEMA_VERSION,
            "checkpoint": str(self.folder),
            "quality": "accuracy" if isinstance(data, ImageData) else "perplexity",
            "baseline": baseline,
            "groups": rows,
            "settings": settings.model_dump(mode="json"),
            "versions": versions(),
            "device": processor(),
        }

    def _cell(
        self, model: nn.Module, choice: Selection, data: ImageData | TokenData, baseline: dict[str, Any]
    ) -> dict[str, Any]:
        if not choice:  # the share of a few units is less than one
            return {key: baseline[key] for key in ("value", "loss")}
        with masked(model, choice):
            found = _judge(model, data, self.folder, limit=False)
        return {key: found[key] for key in ("value", "loss")}


class _Remaining:
    """Time to go, by the mean of the cells that were measured in this run."""

    def __init__(self, cells: int) -> None:
        self._left, self._measured, self._seconds = cells, 0, 0.0

    @contextmanager
    def timed(self, is_kept: bool) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._left -= 1
        if not is_kept:
            self._measured += 1
            self._seconds += time.monotonic() - began

    def __str__(self) -> str:
        return clock(self._left * self._seconds / self._measured) if self._measured else "-:--"


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
    if held_out and is_classifier(folder):
        config = vision_config(folder)
        images = fitting_images(folder, config, "test", progress).first(settings.images)
        return ImageData(images, config.mean, config.std, batch=256)
    if held_out:
        context = open_checkpoint(folder).config.max_position_embeddings
        if settings.window > context:
            raise ConfigError(f"window={settings.window} is longer than the context of {folder}, {context} tokens")
        return TokenData(evaluation_windows(Tokenizer.from_folder(folder), tokens, 0, settings.window)["prose"], 1)
    calibrate = Calibrate(images=settings.images, tokens=tokens, window=settings.window, batch_windows=1)
    data = open_data(folder, calibrate, progress)
    assert isinstance(data, ImageData | TokenData)
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
