"""An INT8 image classifier behind a server: ONNX Runtime with the options of its artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.onnx import ONNX_RUNTIME, recorded
from penjing.core.artifact.onnx_classifier import (
    ClassifierArtifact,
    logit_difference,
    normalised,
    open_classifier_artifact,
    recorded_images,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, SERVED
from penjing.core.errors import InputError, RequestError, ServerError
from penjing.core.runtime.onnx_runtime import INPUT, OUTPUT, run_session
from penjing.serve.client.protocol import CLASSIFIER, REQUEST_SECONDS
from penjing.serve.families.base import Arrays, Served, Signature, TensorSpec, Workload, in_parts
from penjing.serve.families.batched import batched
from penjing.serve.families.row_threads import RowThreads

if TYPE_CHECKING:
    from penjing.serve.client.client import AsyncClient, Client

PIXELS = "pixels"
PART = 16  # images that one thread runs at once
LOCAL_BATCH = 64  # images that ONNX Runtime runs at once where it is timed alone
IMAGES_UNDER_WAY = 256  # four batches


def signature(artifact: ClassifierArtifact) -> Signature:
    """Either `images`, the model's own float tensor, or `pixels`, which are normalised here, gives `logits`."""
    shape = (artifact.config.model.in_channels, *artifact.config.image_size)
    labels = artifact.config.labels
    return Signature(
        name=CLASSIFIER,
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
        self._artifact = open_classifier_artifact(folder)
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

    def example(self) -> NDArray[Any]:
        """One black image."""
        return self.prepare({PIXELS: np.zeros((1, *self._shape), np.uint8)})


def workload(
    folder: Path, client: Client, *, images: int = 4096, threads: int = 0, request_images: int = LOCAL_BATCH
) -> Workload:
    """256 images are always under way to the server, as normalised floats and as pixels; alone, ONNX Runtime runs
    batches of 64 floats.

    Args:
        images: of one turn.
        threads: of ONNX Runtime in this process; 0 takes one for each core, as the server does by default.
        request_images: of one request, up to 64: by default what ONNX Runtime runs at once alone.

    Raises:
        InputError: the folder is no classifier's artifact.
        ServerError: no server answers, or with other logits than this process: it serves another model.
    """
    artifact = open_classifier_artifact(folder)
    session = artifact.session(threads)
    shape = (LOCAL_BATCH, artifact.config.model.in_channels, *artifact.config.image_size)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    floats = normalised(pixels, artifact.config)
    if not np.allclose(client.classify(floats).logits, run_session(session, floats), atol=1e-3):
        raise ServerError(f"{client.server} answers with other logits than {folder}: does it serve that artifact?")

    def alone() -> int:
        count = max(1, images // LOCAL_BATCH)
        for _ in range(count):
            session.run(None, {INPUT: floats})
        return count * LOCAL_BATCH

    async def ask(client: AsyncClient, part: NDArray[Any]) -> None:
        await client.classify(part, timeout=REQUEST_SECONDS)

    starts = range(0, LOCAL_BATCH - request_images + 1, request_images)
    streams = max(1, IMAGES_UNDER_WAY // request_images)
    return Workload(
        unit="images",
        alone=alone,
        forms={
            name: [given[at : at + request_images] for at in starts]
            for name, given in (("server_floats", floats), ("server_pixels", pixels))
        },
        request_rows=request_images,
        ask=ask,
        num_requests=max(streams, images // request_images),
        streams=streams,
        facts={"request_images": request_images},
    )


def parity(folder: Path, client: Client) -> Served:
    """Its logits beside those of the fake-quantized model in the record, and of ONNX Runtime here and now.

    Raises:
        InputError: damaged, or the endpoint has other classes.
    """
    artifact = open_classifier_artifact(folder)
    pixels = recorded_images(artifact.parity)
    images = normalised(pixels, artifact.config)
    local = artifact.logits(artifact.session(), pixels)
    served = np.concatenate(in_parts(len(images), lambda part: client.classify(images[part]).logits))
    if served.shape != local.shape:
        raise InputError(
            f"the endpoint answers with {served.shape[1]} classes, {folder} has {local.shape[1]}: it serves another one"
        )
    differences = (
        logit_difference((FAKE_QUANTIZED, SERVED), recorded(artifact.parity, FAKE_QUANTIZED), served),
        logit_difference((ONNX_RUNTIME, SERVED), local, served),
    )
    return Served(served.tolist(), differences, artifact.parity.bound, bool(np.array_equal(local, served)))


FAMILY = batched(
    name=CLASSIFIER,
    open_artifact=open_classifier_artifact,
    signature=signature,
    load=lambda folder, settings: Classifier(folder, settings.threads),
    how_to_compress="the checkpoint of an image classifier, and artifacts are served; make one with "
    "'penjing compress quantize {folder} {folder}-int8'",
    workload=workload,
    parity=parity,
)
