"""The parity record of an image classifier: images, and the logits that they give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.compress.parity.base import NetworkParity
from penjing.core.artifact.onnx import recorded
from penjing.core.artifact.onnx_classifier import (
    QUANTITY,
    ClassifierArtifact,
    images_to_record,
    logit_difference,
    normalised,
    open_classifier_artifact,
    recorded_images,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Difference
from penjing.core.checkpoint.classifier_config import ClassifierConfig
from penjing.core.runtime.onnx_runtime import open_session, run_session


class ClassifierParity(NetworkParity[ClassifierArtifact, NDArray[Any]]):
    """`pixels` (N, C, H, W) uint8 → (N, classes) logits."""

    family = "classifier"
    quantity = QUANTITY
    statistic = "largest"
    hint = "raise parity_bound if that is acceptable"

    def __init__(self, pixels: NDArray[np.uint8], config: ClassifierConfig) -> None:
        self._pixels = pixels
        self._images = normalised(pixels, config)

    @staticmethod
    def open(folder: Path) -> ClassifierArtifact:
        return open_classifier_artifact(folder)

    @classmethod
    def of(cls, artifact: ClassifierArtifact) -> tuple[Self, NDArray[Any]]:
        return cls(recorded_images(artifact.parity), artifact.config), recorded(artifact.parity, FAKE_QUANTIZED)

    def inputs(self) -> dict[str, Any]:
        return images_to_record(self._pixels)

    def run(self, file: Path, options: dict[str, str], optimise: bool) -> NDArray[Any]:
        return run_session(open_session(file, options, threads=1, optimise=optimise), self._images)

    def stored(self, answers: NDArray[Any]) -> list[Any]:
        return answers.tolist()

    def differences(
        self, between: tuple[str, str], first: NDArray[Any], second: NDArray[Any]
    ) -> tuple[Difference, ...]:
        return (logit_difference(between, first, second),)

    def given(self) -> tuple[Tensor, ...]:
        return (torch.from_numpy(self._images),)

    def read(self, outputs: Sequence[Tensor]) -> NDArray[Any]:
        return outputs[0].numpy()
