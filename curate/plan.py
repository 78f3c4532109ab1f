"""What a recipe comes to: files cut into tasks, steps cut into stages, and a fingerprint for each stage.

A stage is a run of steps that look at one document at a time; deduplication, which looks at all, stands between two,
and a step that learns from the documents begins one.
The fingerprint of a stage covers the files, the steps up to it, penjing's own code and the packages that decide what
comes out: results of another recipe, or another version, are never taken for those of this one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import node
from typing import Any

import penjing.core.text.near_duplicates as near_duplicates
import penjing.core.text.records as records
from penjing.core.config import key_of, parse_config
from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text, sha256_file
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress
from penjing.curate.documents.read import SourceFile, source_files
from penjing.curate.recipe import CurateRecipe
from penjing.curate.steps.base import LearningStep, StepConfig
from penjing.curate.steps.dedup import DedupStep

PLAN_FILE = "plan.json"
_PACKAGES = (
    "datatrove", "ftfy", "fasttext-numpy2-wheel", "trafilatura", "pyarrow", "numpy", "phonenumbers", "python-stdnum",
)  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Places of its steps in the recipe, of the deduplication before it and after it (None where there is none), and
    its folder."""

    steps: tuple[int, ...]
    before: int | None
    after: int | None
    folder: Path


@dataclass(frozen=True)
class Plan:
    """A recipe, its files, and what each task takes: files[begin:end]."""

    recipe: CurateRecipe
    files: tuple[SourceFile, ...]
    tasks: tuple[tuple[int, int], ...]
    code: str

    @property
    def stages(self) -> list[Stage]:
        """The stages in order; the last has no deduplication behind it."""

        def end(after: int | None) -> None:
            nonlocal key, steps, before
            used = [self.recipe.steps[index] for index in ([] if before is None else [before]) + steps]
            key = key_of(key, [each.model_dump(mode="json") for each in used], [_facts(each) for each in used])
            if after is not None:
                key = key_of(key, self.recipe.steps[after].model_dump(mode="json"), _facts(self.recipe.steps[after]))
            folder = self.recipe.work_folder / f"stage-{len(stages)}-{key[:16]}"
            stages.append(Stage(tuple(steps), before, after, folder))
            steps, before = [], after

        key = key_of([asdict(file) for file in self.files], self.tasks, self.code, self._sources())
        stages: list[Stage] = []
        steps: list[int] = []
        before: int | None = None
        for place, step in enumerate(self.recipe.steps):
            if isinstance(step, LearningStep) and (steps or before is not None or not stages):
                end(None)  # what the steps before it left is stored, and it learns from that
            if isinstance(step, StepConfig):
                steps.append(place)
            else:
                end(place)
        end(None)
        return stages

    def save(self, path: Path) -> None:
        """Write it for the processes that do the tasks."""
        values = {
            "recipe": self.recipe.model_dump(mode="json"),
            "files": [asdict(file) for file in self.files],
            "tasks": self.tasks,
            "code": self.code,
        }
        atomic_write_text(path, json.dumps(values))

    def check_code(self) -> None:
        """See that this machine keeps what the one that made the plan would keep.

        Raises:
            SetupError: penjing's modules or the packages that decide differ.
        """
        if self.code != _code():
            raise SetupError(
                f"{node()} has another version of penjing, or of {', '.join(_PACKAGES)}, than the machine that made "
                "the plan, and might keep other documents; install the same on all"
            )

    def _sources(self) -> list[Any]:
        return [source.model_dump(mode="json") for source in self.recipe.sources]


def load_plan(path: Path) -> Plan:
    """What `Plan.save` wrote."""
    values = read_json_object(path)
    return Plan(
        parse_config(CurateRecipe, values["recipe"], str(path)),
        tuple(SourceFile(**file) for file in values["files"]),
        tuple((begin, end) for begin, end in values["tasks"]),
        values["code"],
    )


def make_plan(recipe: CurateRecipe, progress: Progress) -> Plan:
    """List the files of the sources and share them out.

    Raises:
        InputError: a source has no files.
        SetupError: a package of Debian cannot be fetched.
    """
    own = (recipe.output, recipe.work_folder)  # a source may be the folder that both lie in
    files = [
        file for number, source in enumerate(recipe.sources) for file in source_files(number, source, progress, own)
    ]
    limit, tasks, begin, size = recipe.task_mb * 1e6, [], 0, 0
    for place, file in enumerate(files):
        if size and size + file.size > limit:
            tasks.append((begin, place))
            begin, size = place, 0
        size += file.size
    tasks.append((begin, len(files)))
    return Plan(recipe, tuple(files), tuple(tasks), _code())


def _code() -> str:
    """A hash of penjing's own modules and of the versions that decide what comes out."""
    own = sorted(Path(__file__).parent.rglob("*.py")) + [
        Path(str(each.__file__)) for each in (near_duplicates, records)
    ]
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    return key_of([sha256_file(path) for path in own], versions)


def _facts(step: StepConfig | DedupStep) -> list[Any]:
    return [(str(path.absolute()), sha256_file(path)) for path in step.files()]
