"""The parity record of a classifier: the fake-quantized network against every way in which ONNX Runtime may run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.compress.graph.integers import IntegerRun
from penjing.compress.graph.roundings import roundings
from penjing.compress.quantize.targets import NO_TENSORRT
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx import ONNX_RUNTIME, Quantization, gate_onnx, recorded
from penjing.core.artifact.onnx_classifier import (
    QUANTITY,
    ClassifierArtifact,
    images_to_record,
    logit_difference,
    normalised,
    open_classifier_artifact,
    recorded_images,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Difference, Parity
from penjing.core.checkpoint.classifier import ClassifierConfig
from penjing.core.graph.network import Network
from penjing.core.progress import Progress
from penjing.core.runtime.onnx_runtime import open_session, run_session

HINT = "raise parity_bound if that is acceptable"


@torch.no_grad()
def measure(
    network: Network,
    stored: Network,
    onnx_file: Path,
    config: ClassifierConfig,
    quantization: Quantization,
    pixels: NDArray[np.uint8],
    bound: float,
) -> tuple[Parity, Difference]:
    """Run `pixels` (N, C, H, W) through `stored`, whose sums are exact (`IntegerRun`), and through `onnx_file`
    (`Quantization.ways`), and hold `network` to it layer by layer (`roundings`).

    Args:
        network: calibrated or trained, in evaluation mode.
        stored: what was made of it for the file.
        bound: of the largest difference of logits, in ONNX Runtime with the options that the artifact asks for.

    Returns:
        The artifact's record, and how far the layers of `network` are from it.

    Raises:
        InputError: a bound is exceeded (an artifact that does so is refused), or there is NaN.
    """
    images = normalised(pixels, config)
    given = torch.from_numpy(images)
    reference = IntegerRun(stored)
    logits: dict[str, NDArray[Any]] = {FAKE_QUANTIZED: reference.run(given)[0].numpy()}
    held = roundings(network, reference.codes, (given,))
    logits |= _in_onnx_runtime(onnx_file, quantization, images)
    limit = Bound(between=(FAKE_QUANTIZED, ONNX_RUNTIME), quantity=QUANTITY, statistic="largest", value=bound)
    parity = Parity(
        family="classifier",
        inputs=images_to_record(pixels),
        outputs={name: values.tolist() for name, values in logits.items()},
        differences=_gated(logits, limit),
        bound=limit,
        unmeasured={"tensorrt": NO_TENSORRT} if quantization.target == "tensorrt" else {},
    )
    return parity, held


def rerun(folder: Path, progress: Progress) -> tuple[Difference, ...]:
    """Run the record's images through the artifact in `folder` again, here and now; every hash is checked.

    Raises:
        InputError: damaged, or ONNX Runtime on this machine is further from the fake-quantized model than the record's
            bound.
    """
    artifact = open_classifier_artifact(folder)
    progress.start("parity", 1)
    differences = compare_file(artifact, folder / MODEL_FILE, artifact.quantization)
    progress.advance()
    return differences


def compare_file(artifact: ClassifierArtifact, file: Path, quantization: Quantization) -> tuple[Difference, ...]:
    """Run the record's images through `file`, the artifact's own or an export that takes its place.

    Raises:
        InputError: beyond the record's bound.
    """
    record = artifact.parity
    images = normalised(recorded_images(record), artifact.config)
    logits: dict[str, NDArray[Any]] = {FAKE_QUANTIZED: recorded(record, FAKE_QUANTIZED)}
    return _gated(logits | _in_onnx_runtime(file, quantization, images), record.bound)


def _in_onnx_runtime(
    onnx_file: Path, quantization: Quantization, images: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    return {
        name: run_session(open_session(onnx_file, entries, threads=1, optimise=optimise), images)
        for name, (entries, optimise) in quantization.ways().items()
    }


def _gated(logits: dict[str, NDArray[Any]], bound: Bound) -> tuple[Difference, ...]:
    first = logits[FAKE_QUANTIZED]
    differences = tuple(
        logit_difference((FAKE_QUANTIZED, name), first, other)
        for name, other in logits.items()
        if name != FAKE_QUANTIZED
    )
    gate_onnx(differences, bound, HINT)
    return differences
