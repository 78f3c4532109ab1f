"""Every sensitivity study: the parts of a network are changed one by one, and the network is judged each time.

What is changed (`pruning.py`, `bits.py`) and how a network is judged are tables by family. Cells outlive a kill, and
the output appears when all are measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from penjing.compress.families.base import family_at
from penjing.compress.measure.perplexity import LARGEST_LOSS
from penjing.compress.quantize.bits import RESULT_FILE
from penjing.compress.report.study_page import study_page
from penjing.compress.samples.data import ImageData, fitting_images
from penjing.compress.sensitivity.cells import Remaining, already_published
from penjing.core.checkpoint.classifier import classifier_config
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.config import Config, key_of, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES, FamilyName
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.info import processor, versions
from penjing.core.progress import Progress, Silent, plural
from penjing.core.work import WorkFolder
from penjing.train.sources.tensors import calling_once

PAGE_FILE = "sensitivity.html"
SCHEMA = 2
BATCH_IMAGES = 256
Samples = Literal["calibration", "held-out"]
Quality = Literal["accuracy", "perplexity", "similarity"]


@dataclass(frozen=True)
class Study:
    """One network, ready to be changed and judged.

    Attributes:
        quality: what `value` is of the network and of every cell.
        baseline: {value, loss (nats an image or token), samples (images or windows)} of the network as it is.
        sizes: part, in the network's order → its units or weights.
        steps: how far each part is changed: shares of its units, or widths in bits.
        cell: part and step → {value, loss, …}; afterwards every bit of the network is as before.
        more: further entries of the record.
    """

    quality: Quality
    baseline: dict[str, Any]
    sizes: Mapping[str, int]
    steps: tuple[float, ...]
    cell: Callable[[str, Any], dict[str, Any]]
    more: Mapping[str, Any]


def _none(_: Config) -> dict[str, dict[str, str]]:
    return {}


@dataclass(frozen=True)
class Measure:
    """How networks of one family are studied.

    Attributes:
        settings: their class; every one has a default.
        flags: of the command line that the settings take.
        open: checkpoint, settings → the study, whose costly preparations the work folder keeps.
        files: settings → what lies in the files that they name: a setting, then file name → SHA-256.
    """

    settings: type[Config]
    flags: tuple[str, ...]
    open: Callable[[Path, Any, WorkFolder, Progress], Study]
    files: Callable[[Any], dict[str, dict[str, str]]] = _none


@dataclass(frozen=True)
class Sensitivity:
    """A kind of study.

    Attributes:
        kind: "pruning" or "bits".
        suffix: of the folder that is made, when none is named.
        steps: the setting that says how far parts are changed, and the type of one.
        doing: "pruning", "rounding".
        families: what can be studied.
    """

    kind: str
    suffix: str
    steps: tuple[str, type[int] | type[float]]
    doing: str
    families: Mapping[FamilyName, Measure]

    def settings_of(self, folder: Path, flags: Mapping[str, Any]) -> Config:
        """The settings that flags amount to; those of `steps` as "8,6,4".

        Raises:
            ConfigError: a value out of range.
            InputError: as `of` says.
        """
        measure, (name, number) = self.of(folder), self.steps
        values = {flag: flags[flag] for flag in measure.flags if flag in flags}
        try:
            values[name] = [number(text) for text in flags[name].split(",")]
        except ValueError:
            example = ",".join(f"{step:g}" for step in getattr(measure.settings(), name))
            kind = "whole numbers" if number is int else "numbers"
            raise ConfigError(f"--{name} {flags[name]}: write {kind} with commas, as {example}") from None
        return parse_config(measure.settings, values, "sensitivity")

    def of(self, folder: Path) -> Measure:
        """How the network in `folder` is studied.

        Raises:
            InputError: there is no readable `config.json`, or its family cannot be studied.
        """
        if (family := family_at(folder)).name not in self.families:
            known = " and ".join(f"{FAMILIES[name]}" for name in self.families)
            raise InputError(
                f"{folder} holds {family.said}, whose sensitivity to {self.kind} cannot be measured; "
                f"that of {known} can"
            )
        return self.families[family.name]

    @calling_once()
    def measure(
        self,
        folder: Path,
        settings: Config | None = None,
        *,
        out: Path | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Change one part after the other, by each step, and judge; nothing is healed in between.

        Each cell is kept beside `out` until all are there, so that a killed run goes on.

        Args:
            folder: a checkpoint, not quantized.
            settings: of the family's class.
            out: the folder to make, with sensitivity.json and sensitivity.html.
            force: replace what other settings or another checkpoint made.

        Returns:
            The content of sensitivity.json, the same for every study: `kind`, `quality`, `baseline` {value, loss,
            samples}, `rows` [{name, size, cells: [{at (of `steps`), value, loss, …}]}], `input` (hashes), `settings`,
            and what made it.

        Raises:
            ConfigError: windows longer than the model's context, more text than there is.
            InputError: the checkpoint is damaged or quantized already, or cannot be analysed, or is of a family that
                is not studied; `out` holds something else.
            SetupError: no permission, no space, another process works on the same output.
        """
        measure, progress = self.of(folder), progress or Silent()
        settings = settings or measure.settings()
        out = out or folder.with_name(f"{folder.resolve().name}-{self.suffix}")
        hashes = family_at(folder).hashes(folder)
        code = f"{version('penjing')}/{self.kind}/{SCHEMA + 1}"
        key = key_of(settings.model_dump(mode="json"), hashes, measure.files(settings), code)
        if (done := already_published(out, RESULT_FILE, key, force)) is not None:
            progress.note(f"{out} is already done: kept (--force makes it again)")
            return done
        with WorkFolder(out, key) as work:
            study = measure.open(folder, settings, work, progress)
            result = {
                "schema_version": SCHEMA,
                "kind": self.kind,
                "quality": study.quality,
                "checkpoint": str(folder),
                "input": hashes,
                "settings": settings.model_dump(mode="json"),
                "baseline": study.baseline,
                "rows": _rows(study, f"{self.doing} {plural(len(study.sizes), 'part')} one by one", work, progress),
                **study.more,
                "versions": versions(),
                "device": processor(),
                "key": key,
            }
            with publish_folder(out, replace=force, marker=RESULT_FILE) as partial_folder:
                atomic_write_text(partial_folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")
                atomic_write_text(partial_folder / PAGE_FILE, study_page(result))
            work.remove()
        return result


def study_images(folder: Path, samples: Samples, count: int, progress: Progress) -> ImageData:
    """The first `count` images that a classifier is measured on: training images, or held-out ones.

    Raises:
        InputError: they do not fit the classifier in `folder`.
        SetupError: they cannot be fetched.
    """
    config = classifier_config(folder)
    split = "test" if samples == "held-out" else "train"
    images = fitting_images(folder, config, split, progress).first(count)
    return ImageData(images, config.mean, config.std, BATCH_IMAGES)


def check_context(folder: Path, window: int, name: str = "window") -> None:
    """Refuse windows that the decoder in `folder` cannot read.

    Raises:
        ConfigError: `window` is more tokens than its context.
    """
    if window > (context := open_checkpoint(folder).config.max_position_embeddings):
        raise ConfigError(f"{name}={window} is longer than the context of {folder}, {context} tokens")


def sound(folder: Path, baseline: dict[str, Any]) -> dict[str, Any]:
    """`baseline`, if its loss is one that a sound network has.

    Raises:
        InputError: it is not; the message says so of `folder`.
    """
    if not baseline["loss"] < LARGEST_LOSS:  # NaN too
        raise InputError(f"{folder} has a loss of {baseline['loss']:.3g}: it is damaged, or its training diverged")
    return baseline


def cut(loss: float) -> float:
    """`loss`, or the largest that is told apart; NaN counts as that."""
    return loss if loss < LARGEST_LOSS else LARGEST_LOSS


def _rows(study: Study, title: str, work: WorkFolder, progress: Progress) -> list[dict[str, Any]]:
    """Every part with its cells; what `work` keeps is not measured again."""
    total = len(study.sizes) * len(study.steps)
    progress.note(
        f"{plural(len(study.sizes), 'part')}, {plural(total, 'cell')} of {study.baseline['samples']} samples each, "
        f"kept in {work.path.name} until all are measured"
    )
    progress.start(title, total)
    remaining, rows = Remaining(total), []
    for number, (name, size) in enumerate(study.sizes.items()):
        cells = []
        for step in study.steps:
            place = f"cell_{number:04d}_{step:g}"
            with remaining.timed(is_kept=work.record(place) is not None):
                cells.append({"at": step, **work.run(place, partial(study.cell, name, step)).result})
            progress.advance()
            progress.status(f"{remaining.done} of {total} cells, left {remaining}")
        rows.append({"name": name, "size": size, "cells": cells})
    return rows
