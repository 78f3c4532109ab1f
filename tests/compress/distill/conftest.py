"""Tiny teachers and students, and their data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.families.base import family_at
from penjing.compress.samples.data import DataSettings
from penjing.compress.steps.base import Context, Step
from penjing.compress.steps.train import Distill
from penjing.core.progress import Progress, Silent
from penjing.core.work import Places
from penjing.train.families import classifier as vision
from tests.compress.classifiers import made_up_images

STEPS = {"steps": 30, "batch_size": 16, "evaluation_samples": 100, "checkpoint_every": 5, "device": "cpu"}


def do(
    step: Step, student: Path, model: Path, partial: Path, work: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Fill `partial` with what `step` makes of `student` in a run that began with `model`, which is the teacher unless
    the step names one."""
    context = Context(model, family_at(student), DataSettings(), progress or Silent())
    return step.run(Places(student, partial, work), context)


@pytest.fixture
def small_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up images in place of Fashion-MNIST."""
    monkeypatch.setattr(vision, "load_fashion", made_up_images)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of help topics."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("texts")
    for name in sorted(topics)[:20]:
        (folder / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    return folder


@pytest.fixture
def text_step(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Distill]:
    """A step on short sequences of `texts`; keyword arguments change it."""
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))

    def make(**changes: Any) -> Distill:
        values = STEPS | {
            "kind": "distill", "sources": (str(texts),), "sequence_length": 16, "held_out": 0.2,
            "evaluation_samples": 32, "learning_rate": {"peak": 5e-3},
        }  # fmt: skip
        return Distill.model_validate(values | changes)

    return make
