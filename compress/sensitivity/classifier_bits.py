"""`penjing compress sensitivity --bits` of a classifier: what it costs when the weights of one layer are rounded.

Each convolution and linear layer in turn is rounded to each width, one symmetric scale an output channel as in the
artifact (a batch norm's factor behind it changes nothing: it scales whole channels); the rest and all activations stay
floating. Where accuracy is too coarse to tell layers apart, the Kullback-Leibler divergence of the answers from the
floating network's does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from penjing.compress.measure.data import ImageData
from penjing.compress.measure.perplexity import LARGEST_LOSS
from penjing.compress.prune.resnet_subject import ResNetSubject
from penjing.compress.sensitivity.classifier_bits_page import classifier_bits_page
from penjing.compress.sensitivity.study import about, measure_cells, run_study, study_images
from penjing.compress.sensitivity.widths import Widths, round_rows
from penjing.compress.work import WorkFolder
from penjing.core.artifact.classifier import is_vision_artifact
from penjing.core.config import key_of
from penjing.core.errors import InputError
from penjing.core.manifest import verify
from penjing.core.progress import Progress, Silent

BASELINE = "baseline"


class ClassifierBits(Widths):
    """`images`: how many are measured on."""

    images: int = Field(default=512, ge=1)


@dataclass(frozen=True)
class Answers:
    """What the floating network says of the study's images, and what is right.

    Attributes:
        log_probabilities: (N, classes) float32.
        labels: (N,) int64.
    """

    log_probabilities: Tensor
    labels: Tensor


def sensitivity_to_bits(
    folder: Path,
    settings: ClassifierBits | None = None,
    *,
    out: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure; each cell is kept beside `out` until all are there, so that a killed run goes on.

    Args:
        folder: a classifier's checkpoint, not quantized.
        out: the folder to make, with sensitivity.json and sensitivity.html; FOLDER-bits when left out.
        force: replace what other settings or another checkpoint made.

    Returns:
        {baseline, layers: [{name, parameters, cells: [{bits, value (accuracy), loss, divergence}]}], …}; loss and
        divergence in nats an image, layers named as `quantize.keep` names them.

    Raises:
        InputError: the checkpoint is damaged or quantized already; `out` holds something else.
        SetupError: no permission, no space, another process works on the same output.
    """
    settings, progress = settings or ClassifierBits(), progress or Silent()
    if is_vision_artifact(folder):
        raise InputError(f"{folder} is quantized already; give the checkpoint that it was made from")
    out = out or folder.with_name(f"{folder.resolve().name}-bits")
    hashes = verify(folder).sha256
    key = key_of(settings.model_dump(mode="json"), hashes, f"{version('penjing')}/classifier-bits/1")

    def measure(work: WorkFolder) -> dict[str, Any]:
        found = _measure(folder, settings, work, progress)
        return found | {"kind": "bits", "quality": "accuracy", "input": hashes} | about(folder, settings)

    return run_study(out, key, measure, classifier_bits_page, force=force, progress=progress)


def _measure(folder: Path, settings: ClassifierBits, work: WorkFolder, progress: Progress) -> dict[str, Any]:
    model = ResNetSubject(folder).network()
    data = study_images(folder, settings.data, settings.images, progress)
    labels = torch.from_numpy(data.images.labels.astype(np.int64))

    def floating() -> dict[str, Any]:
        log_probabilities = _log_probabilities(model, data)
        work.save(BASELINE, {BASELINE: log_probabilities})
        return judge(log_probabilities, Answers(log_probabilities, labels)) | {"samples": len(labels)}

    baseline = work.run(BASELINE, floating).result
    if not baseline["loss"] < LARGEST_LOSS:  # NaN too
        raise InputError(f"{folder} has a loss of {baseline['loss']:.3g}: it is damaged, or its training diverged")
    answers = Answers(work.load(BASELINE)[BASELINE], labels)
    layers = weighted_layers(model)

    def cell(layer: nn.Conv2d | nn.Linear, bits: int) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            with rounded(layer, bits):
                return {"bits": bits, **judge(_log_probabilities(model, data), answers)}

        return measure

    cells = {f"cell_{name}_{bits}": cell(layer, bits) for name, layer in layers.items() for bits in settings.widths}
    title = f"rounding {len(layers)} layers one by one"
    results = iter(measure_cells(work, title, cells, progress))
    rows = [
        {
            "name": name,
            "parameters": layer.weight.numel(),
            "cells": [next(results) for _ in settings.widths],
        }
        for name, layer in layers.items()
    ]
    return {"baseline": {name: baseline[name] for name in ("value", "loss", "samples")}, "layers": rows}


def weighted_layers(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """Convolutions and linear layers, in order; a convolution has the name that it shares with its norm."""
    return {
        name.removesuffix(".conv"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }


@contextmanager
def rounded(layer: nn.Conv2d | nn.Linear, bits: int) -> Iterator[None]:
    """Inside the block the weights of `layer` have `bits`, one scale an output channel; then they are as before."""
    weight = layer.weight.detach()  # the same memory
    before = weight.clone()
    try:
        weight.copy_(round_rows(before.flatten(1), bits).view_as(before))
        yield
    finally:
        weight.copy_(before)


def judge(log_probabilities: Tensor, answers: Answers) -> dict[str, float]:
    """`value` (accuracy), `loss` and `divergence` (nats an image), both cut where nothing is learnt from more.

    Args:
        log_probabilities: (N, classes) of the network that is judged.
    """
    value = (log_probabilities.argmax(1) == answers.labels).double().mean()
    loss = F.nll_loss(log_probabilities.double(), answers.labels)
    divergence = F.kl_div(
        log_probabilities.double(), answers.log_probabilities.double(), reduction="batchmean", log_target=True
    )
    cut = (min(float(each), LARGEST_LOSS) if each == each else LARGEST_LOSS for each in (loss, divergence))
    return {"value": float(value)} | dict(zip(("loss", "divergence"), cut, strict=True))


@torch.no_grad()
def _log_probabilities(model: nn.Module, data: ImageData) -> Tensor:
    return torch.cat([model(images).log_softmax(1) for (images,) in data.inputs()])
