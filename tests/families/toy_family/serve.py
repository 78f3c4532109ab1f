"""What the serving stage does with toys: points in, scores out, rows of several requests in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from toy_family.artifact import POINTS, SCORES, ToyArtifact, open_artifact, recorded_points, scores

from penjing.core.artifact.onnx import ONNX_RUNTIME, recorded
from penjing.core.artifact.onnx_classifier import logit_difference
from penjing.core.artifact.parity import FAKE_QUANTIZED, SERVED
from penjing.core.errors import RequestError
from penjing.serve.families.base import Arrays, Served, Signature, TensorSpec
from penjing.serve.families.batched import batched

if TYPE_CHECKING:
    from penjing.serve.client.client import Client

MODEL = "toy"


class Toy:
    """A `BatchModel`."""

    def __init__(self, folder: Path) -> None:
        artifact = open_artifact(folder)
        self._session, (self._inputs, _) = artifact.session(), artifact.shape

    def prepare(self, inputs: Arrays) -> NDArray[Any]:
        """(N, inputs) float32."""
        x = inputs[POINTS]
        if x.ndim != 2 or x.shape[1] != self._inputs:
            raise RequestError(f"{POINTS} must have the shape (N, {self._inputs}), got {x.shape}")
        return x

    def start(
        self, requests: Sequence[NDArray[Any]], begun: Callable[[], None]
    ) -> Callable[[], list[dict[str, np.ndarray]]]:
        """See `BatchModel`."""
        begun()
        return lambda: [{SCORES: scores(self._session, request)} for request in requests]

    def example(self) -> NDArray[Any]:
        """One point."""
        return np.zeros((1, self._inputs), np.float32)


def _signature(artifact: ToyArtifact) -> Signature:
    inputs, classes = artifact.shape
    tensor = TensorSpec(POINTS, "FP32", (inputs,))
    return Signature(MODEL, (tensor,), (tensor,), (TensorSpec(SCORES, "FP32", (classes,)),))


def _parity(folder: Path, client: Client) -> Served:
    artifact = open_artifact(folder)
    x = recorded_points(artifact.parity)
    with triton.InferenceServerClient(client.server) as plain:
        answer = plain.infer(MODEL, [triton.InferInput(POINTS, list(x.shape), "FP32").set_data_from_numpy(x)])
    assert answer is not None
    served, local = answer.as_numpy(SCORES), scores(artifact.session(), x)
    assert served is not None
    differences = (
        logit_difference((FAKE_QUANTIZED, SERVED), recorded(artifact.parity, FAKE_QUANTIZED), served),
        logit_difference((ONNX_RUNTIME, SERVED), local, served),
    )
    return Served(served.tolist(), differences, artifact.parity.bound, bool(np.array_equal(local, served)))


FAMILY = batched(
    name=MODEL,
    open_artifact=open_artifact,
    signature=_signature,
    load=lambda folder, _: Toy(folder),
    how_to_compress="the checkpoint of a toy, and artifacts are served; make one with 'penjing compress quantize'",
    parity=_parity,
)
