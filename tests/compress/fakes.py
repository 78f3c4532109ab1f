"""Steps and evaluation that take no time, so that faults can be put anywhere: what was removed is in the manifest."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penjing.compress import outcome, preflight, run
from penjing.compress.families.base import family
from penjing.compress.measure.evaluate import EvaluateSettings, Quality, accuracy
from penjing.compress.report.schema import Report, write_report
from penjing.compress.steps.base import Context, Step
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.train import Distill, Finetune
from penjing.core.checkpoint.classifier import ClassifierConfig, save_classifier
from penjing.core.manifest import read_manifest, write_manifest
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import cifar_resnet
from penjing.core.progress import Progress
from penjing.core.work import Places

SAMPLES = 1000
POINTS_RAW, POINTS_HEALED = 40, 10  # accuracy points lost for everything removed, before and after healing


def tiny_classifier(folder: Path, side: int = 12) -> Path:
    """A random ResNet for grey images."""
    torch.manual_seed(0)
    network = cifar_resnet(8, width=8, in_channels=1)
    labels = tuple(map(str, range(10)))
    config = ClassifierConfig(model=network, image_size=(side, side), mean=(0.5,), std=(0.25,), labels=labels)
    folder.mkdir(parents=True)
    save_classifier(folder, config, ResNet(network).eval(), {"removed": 0.0, "healed": True})
    return folder


@dataclass
class Faults:
    """Raises `what` at the `at`-th operation of a run (from 1; 0: never), in the middle of it; counts them all."""

    at: int = 0
    what: BaseException = field(default_factory=KeyboardInterrupt)
    operations: list[str] = field(default_factory=list)

    def operation(self, name: str) -> None:
        self.operations.append(name)
        if len(self.operations) == self.at:
            raise self.what


def install(patch: pytest.MonkeyPatch, faults: Faults) -> None:
    """Put the fakes in place of training, pruning, evaluation and measurement."""

    def run_step(step: Step, places: Places, context: Context) -> dict[str, Any]:
        state = dict(read_manifest(places.source).created_by)
        for path in places.source.iterdir():
            if path.name != "penjing.json":
                shutil.copy(path, places.partial)
        (places.scratch / "state").write_text("half")
        faults.operation(step.kind)
        if isinstance(step, Prune):
            assert step.ratio is not None
            state = {"removed": 1 - (1 - state["removed"]) * (1 - step.ratio), "healed": False}
        else:
            state["healed"] = True
        write_manifest(places.partial, "checkpoint", state, {"from": "fakes"})
        return {"state": state}

    def evaluate(folder: Path, model: Path, settings: EvaluateSettings, progress: Progress) -> Quality:
        faults.operation("evaluate")
        state = read_manifest(folder).created_by
        lost = state["removed"] * (POINTS_HEALED if state["healed"] else POINTS_RAW)
        right = np.arange(SAMPLES) < round(SAMPLES * (0.9 - lost / 100))
        return accuracy(right, settings)

    def timed(folders: list[Path], *_: object) -> list[list[dict[str, Any]]]:
        faults.operation("measure")
        return [[] for _ in folders]

    def sizes(bytes_of: int, parameters: int, macs: int) -> dict[str, Any]:
        size = {"parameters": parameters, "bytes": bytes_of, "macs": macs, "macs_per": "image"}
        return {"size": size, "widths": {}}

    def write_reports(folder: Path, made: Report) -> None:
        faults.operation("report")
        write_report(folder, made)

    faked = replace(family("classifier"), evaluate=evaluate, skeleton=lambda _: None)  # type: ignore[arg-type, return-value]
    for kind in (Prune, Distill, Finetune):
        patch.setattr(kind, "run", run_step)
    patch.setattr(run, "family_at", lambda _: faked)
    patch.setattr(outcome, "timed", timed)
    patch.setattr(outcome, "sizes_of", lambda *_: sizes(10, 1, 5))
    patch.setattr(run, "write_reports", write_reports)
    patch.setattr(preflight, "peak_flops", lambda *_: (1e11, "made up"))
    patch.setattr(preflight, "sizes_of", lambda *_: sizes(4000, 1000, 10**6))
    patch.setattr("os.fsync", lambda _: None)  # nothing here survives the machine anyway
