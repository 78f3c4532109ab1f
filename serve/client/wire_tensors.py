"""The gRPC messages between our clients and a batched model: tensors both ways."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penjing.core.errors import RequestError
from penjing.serve.client.protocol import PING

_DTYPES = {
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BOOL": np.bool_,
    "BYTES": np.object_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}
DATATYPES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
"""numpy's types → what Triton server calls them."""


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


def picture_tensor(images: Any) -> dict[str, np.ndarray]:
    """The input that images for two towers are: files are `image`, (N, C, H, W) of uint8 is `pixels`.

    Raises:
        RequestError: neither, or none.
    """
    rows = [images] if isinstance(images, bytes) else images
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, bytes) for row in rows):
        return {"image": _named("image", rows)}
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or len(array) == 0:
        raise RequestError(
            "images must be the bytes of a JPEG or PNG, a list of them, or uint8 of shape (N, C, H, W) with N ≥ 1, got "
            f"{array.dtype} {array.shape}"
        )
    return {"pixels": array}


def text_tensor(texts: Any) -> dict[str, np.ndarray]:
    """The input that a list of texts is: (N, 1) of UTF-8.

    Raises:
        RequestError: no list of texts, or an empty one.
    """
    rows = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [texts]
    if not rows or not all(isinstance(text, str) for text in rows):
        raise RequestError("texts must be one text or a list of one or more")
    array = np.empty((len(rows), 1), np.object_)
    array[:, 0] = [text.encode("utf-8", "surrogatepass") for text in rows]
    return {"text": array}


def named_tensors(inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors by name; a file's bytes or a text, or a list of such, is (N, 1) of bytes.

    Raises:
        RequestError: nothing, or of a type that does not travel.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise RequestError("give the model's inputs in a dictionary, by name; 'penjing graph' shows them")
    return {name: _named(name, value) for name, value in inputs.items()}


def _named(name: str, value: Any) -> np.ndarray:
    rows = [value] if isinstance(value, bytes | str) else value
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, bytes | str) for row in rows):
        array = np.empty((len(rows), 1), np.object_)  # numpy's own type of bytes drops zeros at the end
        array[:, 0] = [row.encode("utf-8", "surrogatepass") if isinstance(row, str) else row for row in rows]
        return array
    array = np.asarray(value)
    strange = array.dtype == np.object_ and not all(isinstance(each, bytes) for each in array.flat)
    if strange or array.dtype not in DATATYPES:
        raise RequestError(
            f"{name} is an array of {array.dtype}, which is not sent; give numbers, flags, bytes or texts"
        )
    return array


def build_infer(
    model: str, tensors: Mapping[str, np.ndarray], timeout: float | None = None, request_id: str = ""
) -> Any:
    """A `ModelInferRequest`; the server refuses it when it has waited for `timeout` seconds, and logs it by
    `request_id`."""
    request = _messages().ModelInferRequest(model_name=model, id=request_id)
    for name, array in tensors.items():
        request.inputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
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


def config_request(model: str) -> Any:
    """A `ModelConfigRequest`."""
    return _messages().ModelConfigRequest(name=model)


def probe(config: Any) -> Any:
    """The smallest request that a model takes, all zeros, made of its `ModelConfig`: it runs the model. A model of
    penjing runs its example in place of it, since a network may not take the smallest."""
    tensors = {}
    for index, given in enumerate(config.input):
        if index == 0 or not given.optional:
            shape = [1] * (config.max_batch_size > 0) + [max(1, size) for size in given.dims]
            kind = type(given).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[given.data_type].name
            datatype = "BYTES" if kind == "TYPE_STRING" else kind.removeprefix("TYPE_")
            tensors[given.name] = np.full(shape, b"" if datatype == "BYTES" else 0, _DTYPES[datatype])
    request = build_infer(config.name, tensors)
    request.parameters[PING].bool_param = True
    return request


def _raw(array: np.ndarray) -> bytes:
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    return b"".join(struct.pack("<I", len(value)) + value for value in array.flat)  # the protocol's BYTES


def _messages() -> Any:
    from tritonclient.grpc import service_pb2

    return service_pb2  # its classes are made when it is imported: type checkers see none
