"""The gRPC messages between our clients and a batched model: tensors both ways."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penjing.core.errors import RequestError

_DTYPES = {"FP32": np.float32, "UINT8": np.uint8, "INT64": np.int64, "INT32": np.int32, "BYTES": np.object_}
_DATATYPES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Classification:
    """What a classifier says of N images: `logits` (N, classes) float32, `classes` (N,) int64, each image's largest."""

    logits: np.ndarray

    @property
    def classes(self) -> np.ndarray:
        return self.logits.argmax(1)


def image_tensor(images: Any) -> dict[str, np.ndarray]:
    """The input that (N, C, H, W) images are: uint8 is `pixels`, any floating type is `images`.

    Raises:
        RequestError: of another type or rank, or none.
    """
    array = np.asarray(images)
    if array.ndim != 4 or len(array) == 0:
        raise RequestError(f"images must have the shape (N, C, H, W) with N ≥ 1, got {array.shape}")
    if array.dtype == np.uint8:
        return {"pixels": array}
    if array.dtype.kind == "f":
        return {"images": array.astype(np.float32, copy=False)}
    raise RequestError(f"images must be uint8 (pixels) or floating (normalised), got {array.dtype}")


def text_tensor(texts: Any) -> dict[str, np.ndarray]:
    """The input that a list of texts is: (N, 1) of UTF-8.

    Raises:
        RequestError: no list of texts, or an empty one.
    """
    rows = [texts] if isinstance(texts, str) else list(texts)
    if not rows or not all(isinstance(text, str) for text in rows):
        raise RequestError("texts must be one text or a list of one or more")
    array = np.empty((len(rows), 1), np.object_)
    array[:, 0] = [text.encode("utf-8", "surrogatepass") for text in rows]
    return {"text": array}


def build_infer(model: str, tensors: Mapping[str, np.ndarray], timeout: float | None = None) -> Any:
    """A `ModelInferRequest`; the server refuses it when it has waited for `timeout` seconds."""
    request = _messages().ModelInferRequest(model_name=model)
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=_DATATYPES[array.dtype], shape=array.shape)
        request.raw_input_contents.append(_raw(array))
    if timeout is not None:
        request.parameters["timeout"].int64_param = max(1, int(timeout * 1e6))
    return request


def read_infer(response: Any) -> dict[str, np.ndarray]:
    """The tensors of a `ModelInferResponse`."""
    return {
        output.name: np.frombuffer(data, _DTYPES[output.datatype]).reshape(output.shape)
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def metadata_request(model: str) -> Any:
    """A `ModelMetadataRequest`."""
    return _messages().ModelMetadataRequest(name=model)


def probe(metadata: Any) -> Any:
    """The smallest request that a model takes, all zeros, made from its `ModelMetadataResponse`: it runs the model."""
    first = metadata.inputs[0]
    shape = [max(1, size) for size in first.shape]
    values = np.full(shape, b"") if first.datatype == "BYTES" else np.zeros(shape, _DTYPES[first.datatype])
    return build_infer(metadata.name, {first.name: values.astype(_DTYPES[first.datatype])})


def _raw(array: np.ndarray) -> bytes:
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    return b"".join(struct.pack("<I", len(value)) + value for value in array.flat)  # the protocol's BYTES


def _messages() -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2  # its classes are made when it is imported: type checkers see none
