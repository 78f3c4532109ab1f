"""An INT8 image classifier behind a server: ONNX Runtime with the options of its artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.classifier import VisionArtifact, normalised, open_vision_artifact
from penjing.core.errors import RequestError
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT, run_session
from penjing.serve.families.base import Arrays, Signature, TensorSpec
from penjing.serve.families.row_threads import RowThreads

NAME = "classifier"
PIXELS = "pixels"
PART = 16  # images that one thread runs at once


def signature(artifact: VisionArtifact) -> Signature:
    """Either `images`, the model's own float tensor, or `pixels`, which are normalised here, gives `logits`."""
    shape = (artifact.config.model.in_channels, *artifact.config.image_size)
    labels = artifact.config.labels
    return Signature(
        name=NAME,
        inputs=(
            TensorSpec(INPUT, "FP32", shape, optional=True),
            TensorSpec(PIXELS, "UINT8", shape, optional=True),
        ),
        file_inputs=(TensorSpec(INPUT, "FP32", shape),),
        outputs=(TensorSpec(OUTPUT, "FP32", (len(labels),), labels=labels),),
    )


class Classifier:
    """A `BatchModel`.

    Args:
        folder: the artifact; every hash is checked.
        threads: of ONNX Runtime; 0 takes one for each core.

    Raises:
        InputError: damaged, or of another kind.
    """

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self._artifact = open_vision_artifact(folder)
        self._threads = RowThreads(self._artifact.session, threads)
        config = self._artifact.config
        self._shape = (config.model.in_channels, *config.image_size)

    def prepare(self, inputs: Arrays) -> NDArray[Any]:
        """(N, C, H, W): uint8 pixels, or float32, normalised and finite."""
        given = [name for name in (INPUT, PIXELS) if name in inputs]
        if len(given) != 1:
            raise RequestError(
                f"give {INPUT} (FP32, normalised) or {PIXELS} (UINT8), " + ("not both" if given else "one of them")
            )
        (name,) = given
        array = inputs[name]
        dtype = np.float32 if name == INPUT else np.uint8
        if array.dtype != dtype or array.ndim != 4 or array.shape[1:] != self._shape or len(array) == 0:
            raise RequestError(
                f"{name} must be {np.dtype(dtype)} of shape (N, {', '.join(map(str, self._shape))}) with N ≥ 1, got "
                f"{array.dtype} of shape {array.shape}"
            )
        # Quantized, NaN would become some integer and the answer look like one.
        if name == INPUT and not np.isfinite(array).all():
            row = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(1)))
            raise RequestError(f"{INPUT}[{row}] holds NaN or infinity; give finite values")
        return array

    def start(
        self, requests: Sequence[NDArray[Any]], begun: Callable[[], None]
    ) -> Callable[[], list[dict[str, np.ndarray]]]:
        """`logits` (N, classes) float32 for each request; see `BatchModel`."""
        if len({request.dtype for request in requests}) > 1:
            requests = [self._floats(request) for request in requests]
        images = requests[0] if len(requests) == 1 else np.concatenate(requests)

        def classify(session: Any, part: slice) -> NDArray[np.float32]:
            return run_session(session, self._floats(images[part]))

        wait = self._threads.start(classify, self._threads.parts(len(images), PART), begun)
        ends = np.cumsum([len(request) for request in requests])
        return lambda: [{OUTPUT: part} for part in np.split(np.concatenate(wait()), ends[:-1])]

    def _floats(self, images: NDArray[Any]) -> NDArray[np.float32]:
        return normalised(images, self._artifact.config) if images.dtype == np.uint8 else images

    def warm_up(self) -> None:
        """Classify one black image."""
        self.start([self.prepare({PIXELS: np.zeros((1, *self._shape), np.uint8)})], lambda: None)()
