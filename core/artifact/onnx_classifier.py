"""Artifact folders of quantized image classifiers; see `onnx.py`.

config.json holds architecture, labels and normalisation (`ClassifierConfig`); model.onnx takes "images"
(batch, C, H, W) float32 and gives "logits" (batch, classes).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.base import MODEL_FILE, PARITY_FILE
from penjing.core.artifact.onnx import OnnxArtifact, open_onnx_artifact
from penjing.core.artifact.parity import Difference, Parity, measured
from penjing.core.checkpoint.classifier_config import ClassifierConfig, classifier_config
from penjing.core.errors import InputError
from penjing.core.images.normalise import normalise
from penjing.core.runtime.onnx_runtime import open_session, run_session

QUANTITY = "logits"


@dataclass(frozen=True)
class ClassifierArtifact(OnnxArtifact):
    """A verified artifact folder."""

    config: ClassifierConfig

    def session(self, threads: int = 0) -> Any:
        """An ONNX Runtime session with the options that the artifact asks for."""
        return open_session(
            self.folder / MODEL_FILE,
            self.quantization.session_options,
            threads=threads,
            optimise=self.quantization.optimise,
        )

    def logits(self, session: Any, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, C, H, W) uint8 images, normalised here → (N, classes)."""
        return run_session(session, normalised(pixels, self.config))


def open_classifier_artifact(folder: Path) -> ClassifierArtifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    return ClassifierArtifact(**vars(open_onnx_artifact(folder, "classifier")), config=classifier_config(folder))


def normalised(pixels: NDArray[np.uint8], config: ClassifierConfig) -> NDArray[np.float32]:
    """(N, C, H, W) uint8 → float32 (value / 255 − mean) / std, per channel."""
    return normalise(pixels, config.mean, config.std)


def images_to_record(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    """(N, C, H, W) images as the inputs of a parity record."""
    return {"images": base64.b64encode(np.ascontiguousarray(pixels).tobytes()).decode(), "shape": list(pixels.shape)}


def recorded_images(parity: Parity) -> NDArray[np.uint8]:
    """(N, C, H, W) images of a parity record.

    Raises:
        InputError: the record is damaged.
    """
    try:
        data = base64.b64decode(parity.inputs["images"], validate=True)
        batch, channels, height, width = parity.inputs["shape"]
        return np.frombuffer(data, np.uint8).reshape(batch, channels, height, width)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{PARITY_FILE} is damaged ({error}); compress the model again") from None


def logit_difference(between: tuple[str, str], first: NDArray[Any], second: NDArray[Any]) -> Difference:
    """Compare (N, classes) logits: absolute differences divided by the standard deviation of the first one's from
    image to image; `same` is the share of images that both put into the same class.

    Raises:
        InputError: NaN or infinity.
    """
    one, other = first.astype(np.float64), second.astype(np.float64)
    for name, values in zip(between, (one, other), strict=True):
        if not np.isfinite(values).all():
            raise InputError(f"{name} computes NaN or infinity; compress the model again")
    spread = np.sqrt(np.square(one - one.mean(0)).mean())
    gaps = np.abs(one - other) / max(float(spread), 1e-30)
    same = float((one.argmax(1) == other.argmax(1)).mean())
    return measured(between, QUANTITY, gaps.size, float(gaps.max()), float(gaps.mean()), same)
