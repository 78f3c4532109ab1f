"""The parity gate of a classifier: the fake-quantized network against every way in which ONNX Runtime may run it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penjing.core.artifact.classifier import (
    FAKE_QUANTIZED,
    MODEL_FILE,
    ONNX_RUNTIME,
    ONNX_RUNTIME_DEFAULT,
    ONNX_RUNTIME_FLOAT,
    LogitDifference,
    Quantization,
    VisionArtifact,
    VisionParity,
    logit_difference,
    normalised,
)
from penjing.core.checkpoint.classifier import VisionConfig
from penjing.core.errors import InputError
from penjing.core.runtime.onnx_runtime import open_session, run_session

NO_TENSORRT = "needs the tensorrt package and a GPU; the file follows its rules for explicit Q/DQ"


@torch.no_grad()
def measure_parity(
    model: nn.Module,
    onnx_file: Path,
    config: VisionConfig,
    quantization: Quantization,
    pixels: NDArray[np.uint8],
    bound: float,
) -> VisionParity:
    """Run `pixels` (N, C, H, W) through the fake-quantized `model` and through `onnx_file`.

    Three runs in ONNX Runtime: with the options that the artifact asks for, with its defaults, and as written, where
    each Q/DQ pair is computed in floating point. The first is what the bound is for.

    Raises:
        InputError: the largest difference exceeds `bound` (an artifact that does so is refused), or there is NaN.
    """
    images = normalised(pixels, config)
    logits = {FAKE_QUANTIZED: model(torch.from_numpy(images)).numpy()} | _in_onnx_runtime(
        onnx_file, quantization, images
    )
    record = VisionParity(
        images=base64.b64encode(np.ascontiguousarray(pixels).tobytes()).decode(),
        shape=tuple(pixels.shape),
        logits={name: tuple(tuple(row) for row in values.tolist()) for name, values in logits.items()},
        differences=_differences(logits),
        bound=bound,
        unmeasured={"tensorrt": NO_TENSORRT} if quantization.target == "tensorrt" else {},
    )
    gate(record.differences, bound)
    return record


def rerun_parity(
    artifact: VisionArtifact, file: Path | None = None, quantization: Quantization | None = None
) -> tuple[LogitDifference, ...]:
    """Run the record's images through the artifact's file again, here and now.

    Args:
        file, quantization: of an export, which takes the place of the artifact's own.

    Raises:
        InputError: ONNX Runtime on this machine is further from the fake-quantized model than the record's bound.
    """
    record = artifact.parity
    images = normalised(record.pixels(), artifact.config)
    logits: dict[str, NDArray[Any]] = {FAKE_QUANTIZED: np.array(record.logits[FAKE_QUANTIZED], np.float64)}
    logits |= _in_onnx_runtime(file or artifact.folder / MODEL_FILE, quantization or artifact.quantization, images)
    differences = _differences(logits)
    gate(differences, record.bound)
    return differences


def gate(differences: tuple[LogitDifference, ...], bound: float) -> None:
    """Refuse what ONNX Runtime computes too differently.

    Raises:
        InputError: with the figures and what to do.
    """
    by_name = {difference.between[1]: difference for difference in differences}
    found, written = by_name[ONNX_RUNTIME], by_name[ONNX_RUNTIME_FLOAT]
    if found.largest <= bound:
        return
    hint = "raise parity_bound if that is acceptable"
    if written.largest <= bound:
        hint = (
            "as written the file agrees, so its integer kernels on this processor do not (without VNNI, 16-bit sums "
            "saturate): use target 'onnxruntime-avx2'"
        )
    raise InputError(
        f"parity: ONNX Runtime's logits differ from the fake-quantized model's by up to {found.largest:.3g} of "
        f"their spread, the bound is {bound:g}; {hint}"
    )


def _in_onnx_runtime(
    onnx_file: Path, quantization: Quantization, images: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    ways: dict[str, tuple[dict[str, str], bool]] = {
        ONNX_RUNTIME: (quantization.session_options, quantization.optimise),
        ONNX_RUNTIME_DEFAULT: ({}, True),
        ONNX_RUNTIME_FLOAT: ({}, False),
    }
    if not quantization.optimise:
        del ways[ONNX_RUNTIME_DEFAULT]
    return {
        name: run_session(open_session(onnx_file, entries, threads=1, optimise=optimise), images)
        for name, (entries, optimise) in ways.items()
    }


def _differences(logits: dict[str, NDArray[Any]]) -> tuple[LogitDifference, ...]:
    first = logits[FAKE_QUANTIZED]
    return tuple(
        logit_difference((FAKE_QUANTIZED, name), first, other)
        for name, other in logits.items()
        if name != FAKE_QUANTIZED
    )
