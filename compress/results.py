"""Checkpoints of a run under names that say what they were made of, so that a later run finds what it can keep.

A result's key is the hash of its source's key and of its step's settings: changing a later step of a recipe, or how
milder repeats are made, keeps every result before. In the work folder lie NN-KIND-KEY, the checkpoint, and
NN-KIND-KEY.json, its record, which comes last.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penjing.compress.measure.evaluate import Quality, quality_from_json
from penjing.compress.plan import Planned, step_key
from penjing.compress.recipe import Recipe
from penjing.compress.samples.own import OWN, WRITER
from penjing.compress.samples.text import CALIBRATE, EVALUATE
from penjing.compress.steps.base import Context, Step
from penjing.core.config import key_of
from penjing.core.files import publish_folder
from penjing.core.work import Places, StepRecord, WorkFolder, check_kept

SCHEMA = "5"  # raise when a step makes another checkpoint from the same settings
_RESULT = re.compile(r"(\d\d+)-[a-z]+-[0-9a-f]{12}")


@dataclass(frozen=True)
class Result:
    """A checkpoint of the run; `record` is what its step said (none for the model that the run begins with)."""

    name: str
    folder: Path
    key: str
    record: StepRecord | None
    quality: Quality

    @property
    def label(self) -> str:
        """Its name without the key, such as "02-distill"."""
        return self.name.rpartition("-")[0]

    @property
    def kind(self) -> str:
        """The kind of its step, or "model"."""
        return self.label.partition("-")[2]


class Results:
    """Makes the results of one run's steps, or finds them made.

    Args:
        hashes: of each input ("model", a teacher's path, or a setting that names texts), file name → SHA-256.
    """

    def __init__(self, recipe: Recipe, context: Context, hashes: dict[str, dict[str, str]], work: WorkFolder) -> None:
        self.recipe, self.context, self.hashes, self.work = recipe, context, hashes, work
        self.progress = context.progress
        self._visited: set[str] = set()

    def model(self) -> Result:
        """The checkpoint that the run begins with."""
        key = key_of(self.hashes["model"])
        name = f"00-model-{key[:12]}"
        return Result(name, self.recipe.model, key, None, self._quality(name, self.recipe.model))

    def make(self, planned: Planned, source: Result) -> Result:
        """The checkpoint that a step makes of `source`."""
        key = self._key(planned, source)
        name = f"{planned.name}-{key[:12]}"
        folder = self.work.path / name
        self._visited.add(name)
        if not folder.exists():
            self.work.forget(name)
            self._drop_others(planned.number)
        else:
            check_kept(folder)
        record = self.work.run(name, lambda: self._run(planned, source, folder))
        shutil.rmtree(self._scratch(folder), ignore_errors=True)
        return Result(name, folder, key, record, self._quality(name, folder))

    def _run(self, planned: Planned, source: Result, folder: Path) -> dict[str, Any]:
        self.progress.note(f"{planned.name}: {changed_settings(planned.step)}")
        scratch = self._scratch(folder)
        scratch.mkdir(exist_ok=True)
        if any(scratch.iterdir()):
            self.progress.note(f"{planned.name}: going on with what an earlier run left in {scratch.name}")
        with publish_folder(folder, replace=True) as partial:
            return planned.step.run(Places(source.folder, partial, scratch), self.context)

    def _scratch(self, folder: Path) -> Path:
        return folder.with_name(f"{folder.name}.scratch")

    def _key(self, planned: Planned, source: Result) -> str:
        step, teacher = planned.step, planned.step.teacher_of(self.recipe.model)
        parts: list[Any] = [source.key, step.decides()]
        if teacher is not None:
            parts.append(self.hashes["model" if teacher == self.recipe.model else str(teacher)])
        if step.needs_data():
            parts += [self.recipe.data.model_dump(mode="json"), self.hashes.get(CALIBRATE)]
        elif self.recipe.data.source is not None:  # what is trained on
            parts += [self.recipe.data.source_settings(), self.recipe.data.held_out, self.hashes.get(CALIBRATE)]
        taught = OWN in step.decides().get("sources", ())
        if taught:
            parts.append(self.recipe.data.own_texts.model_dump(mode="json"))
        if WRITER in self.hashes and (taught or (step.needs_data() and Path(OWN) in self.recipe.data.calibrate)):
            parts.append(self.hashes[WRITER])
        if (named := step_key(planned.place)) in self.hashes:
            parts.append(self.hashes[named])
        return key_of(*parts)

    def _quality(self, name: str, folder: Path) -> Quality:
        settings = self.recipe.evaluate
        measured = f"{name}-quality-{key_of(settings.model_dump(mode='json'), self.hashes.get(EVALUATE))[:8]}"
        evaluate = self.context.family.evaluate
        record = self.work.run(measured, lambda: asdict(evaluate(folder, self.recipe.model, settings, self.progress)))
        return quality_from_json(record.result)

    def _drop_others(self, number: int) -> None:
        """Delete results of this number that the recipe no longer makes: one more is about to be written."""
        for folder in self.work.path.iterdir():
            match = _RESULT.match(folder.name)
            if folder.is_dir() and match and int(match[1]) == number and match[0] not in self._visited:
                self.work.forget(match[0])
                shutil.rmtree(folder)


def num_complete(work: WorkFolder) -> int:
    """How many results lie complete in the work folder."""
    return sum(1 for path in work.path.glob("*.json") if _RESULT.fullmatch(path.stem))


def changed_settings(step: Step) -> str:
    """What a step has other than by default, such as "transform.rotate false, lm_head int8"."""
    values = step.model_dump(mode="json", exclude={"kind", "guard", "rounds"}, exclude_defaults=True)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    said = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in flat.items()]
    return ", ".join(said) or "default settings"
