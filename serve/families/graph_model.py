"""A graph behind a server: requests become the network's inputs, parts of batches run, each request gets its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.artifact.onnx_graph import (
    graph_differences,
    open_graph_artifact,
    recorded_inputs,
    run_graph,
)
from penjing.core.errors import InputError, PenjingError, RequestError, runtime_says
from penjing.core.graph.config import GraphConfig, TensorSpec
from penjing.core.images.decode import MAX_PIXELS, arranged, decode_image, network_input
from penjing.core.text.network_inputs import texts_of
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families.base import Answer, Arrays
from penjing.serve.families.encoder import TEXT, read_texts
from penjing.serve.families.row_threads import RowThreads

log = logging.getLogger(__name__)
PIXELS, IMAGE = "pixels", "image"
PART = 16  # rows that one thread runs at once
SEEN, LEAST = 16, 512  # a dynamic axis may be so many times as long as in the record, and at least so long
APART = 0.01  # of an output's spread, on average: less is rounding that falls otherwise in other company


class GraphSettings(BatchConfig):
    """Settings of a batched model, and how large a request for a graph may be."""

    max_axis_size: int | None = Field(
        default=None,
        ge=1,
        description="Longest dynamic axis of a request, apart from the batch. When left out: sixteen times as long as "
        "in the artifact's parity record, and at least 512.",
    )
    max_request_bytes: int = Field(
        default=64 << 20, ge=1, description="Bytes of all tensors of a request; a larger one is refused."
    )
    max_image_pixels: int = Field(
        default=MAX_PIXELS, ge=1, description="Pixels of an encoded image; a larger one is refused and not decoded."
    )
    text_tokens: int = Field(
        default=128,
        ge=1,
        description="Tokens of a text at most, as data.text_tokens of its calibration; longer ones are cut.",
    )


@dataclass(frozen=True)
class GraphRequest:
    """A request whose tensors were checked: the network's inputs by name, or in place of the first one `pixels`, which
    are to be normalised, or encoded `images`. `kind` is equal for requests that can be joined."""

    arrays: Mapping[str, NDArray[Any]]
    pixels: NDArray[np.uint8] | None
    images: tuple[bytes, ...]
    rows: int
    kind: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return self.rows


@dataclass(frozen=True)
class _Piece:
    """Rows of one request in a part of a batch."""

    index: int
    request: GraphRequest
    rows: slice


class GraphModel:
    """A `BatchModel`.

    Args:
        folder: the artifact; every hash is checked.

    Raises:
        InputError: damaged, or of another kind.
    """

    def __init__(self, folder: Path, settings: GraphSettings) -> None:
        self._artifact = open_graph_artifact(folder)
        self._config, self._settings = self._artifact.config, settings
        self._threads = RowThreads(self._artifact.session, settings.threads)
        self._recorded = recorded_inputs(self._artifact.parity, self._config)
        self._texts = texts_of(folder, self._config.inputs)
        self._largest: dict[str, int] = {}
        for spec in self._config.inputs:
            for axis, size in zip(spec.shape, self._recorded[spec.name].shape, strict=True):
                if isinstance(axis, str):
                    bound = settings.max_axis_size or max(LEAST, SEEN * size)
                    self._largest[axis] = max(bound, self._largest.get(axis, 0))
        self._batch = self._config.inputs[0].shape[0] if self._config.batched else None
        if isinstance(self._batch, str):
            self._largest[self._batch] = settings.max_batch_size
        self._joins = self._config.batched and self._rows_are_independent()
        if self._config.batched and not self._joins:
            log.info("rows of %s depend on each other: requests are not joined", folder)

    def prepare(self, inputs: Arrays) -> GraphRequest:
        """See `BatchModel`."""
        if self._texts is not None and (name := text_input(self._config)) in inputs:
            if others := [each for each in inputs if each != name]:
                raise RequestError(f"{name} takes the place of all inputs; leave {others[0]} out")
            texts = read_texts(inputs[name], name)
            return self.prepare(self._texts.arrays(texts, self._settings.text_tokens))
        first, *others = self._config.inputs
        names = image_inputs(self._config)
        given = [name for name in (first.name, *names) if name in inputs]
        if len(given) != 1:
            raise RequestError(f"give one of {', '.join((first.name, *names))}, got {' and '.join(given) or 'none'}")
        if missing := [spec.name for spec in others if spec.name not in inputs]:
            raise RequestError(f"{missing[0]} is missing; the network takes {', '.join(map(str, self._config.inputs))}")
        if (size := sum(map(_bytes, inputs.values()))) > (most := self._settings.max_request_bytes):
            raise RequestError(f"the request has {size} bytes, at most {most} are taken (--set max_request_bytes=N)")
        sizes: dict[str, int] = {}
        pixels, images, arrays = None, (), {}
        if given[0] == first.name:
            arrays[first.name] = self._checked(first, inputs[first.name], sizes)
        elif given[0] == names[0]:
            pixels = self._checked(pixel_spec(self._config), inputs[names[0]], sizes)
        else:
            images = self._checked_images(given[0], inputs[given[0]], sizes)
        for spec in others:
            arrays[spec.name] = self._checked(spec, inputs[spec.name], sizes)
        rows = sizes[str(first.shape[0])] if self._config.batched else 1
        shapes = (self._row_shape(arrays.get(spec.name, pixels)) for spec in self._config.inputs)
        return GraphRequest(arrays, pixels, images, rows, tuple(shapes))

    def _row_shape(self, array: NDArray[Any] | None) -> tuple[int, ...]:
        if array is not None:
            return array.shape[1:]
        pixels = self._config.pixels
        assert pixels is not None, "only images are given as no tensor"
        image = np.empty((pixels.height, pixels.width, len(pixels.mean)), np.uint8)
        return arranged(image, pixels).shape

    def _checked(self, spec: TensorSpec, array: NDArray[Any], sizes: dict[str, int]) -> NDArray[Any]:
        """`array`, if it fits; `sizes` learns the sizes of its dynamic axes.

        Raises:
            RequestError: the type, the rank, a size, or NaN.
        """
        if array.dtype != np.dtype(spec.dtype) or array.ndim != len(spec.shape):
            raise RequestError(f"{spec} was given as {array.dtype} of shape {list(array.shape)}")
        for axis, size in zip(spec.shape, array.shape, strict=True):
            if isinstance(axis, str):
                self._check_axis(str(spec), axis, size, sizes)
            elif size != axis:
                raise RequestError(f"{spec} was given with the shape {list(array.shape)}")
        # Quantized, NaN would become some integer and the answer look like one.
        if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
            raise RequestError(f"{spec.name} holds NaN; give numbers")
        return array

    def _check_axis(self, what: str, axis: str, size: int, sizes: dict[str, int]) -> None:
        if size != sizes.setdefault(axis, size):
            raise RequestError(f"{what} has {size} in axis {axis!r}, another input {sizes[axis]}; give equal sizes")
        most = self._largest[axis]
        if not 1 <= size <= most:
            hint = "max_batch_size" if axis == self._batch else "max_axis_size"
            raise RequestError(f"{what} has {size} in axis {axis!r}, 1 to {most} are taken (--set {hint}=N)")

    def _checked_images(self, name: str, array: NDArray[Any], sizes: dict[str, int]) -> tuple[bytes, ...]:
        first = self._config.inputs[0]
        rows = first.shape[0] if len(first.shape) == 4 else 1
        if array.dtype != np.object_ or (isinstance(rows, int) and array.size != rows):
            raise RequestError(f"{name} must hold {rows} encoded images, got {array.dtype}{list(array.shape)}")
        if isinstance(rows, str):
            self._check_axis(name, rows, array.size, sizes)
        if not all(isinstance(value, bytes) for value in array.flat):
            raise RequestError(f"{name} must hold the bytes of encoded images")
        return tuple(array.flat)

    def start(self, requests: Sequence[GraphRequest], begun: Callable[[], None]) -> Callable[[], Sequence[Answer]]:
        """See `BatchModel`; what is wrong with one request is that one's alone."""
        parts = list(self._parts(requests))
        wait = self._threads.start(self._run, parts, begun)

        def finish() -> list[Answer]:
            found: list[list[Answer]] = [[] for _ in requests]
            for pieces, answers in zip(parts, wait(), strict=True):
                for piece, answer in zip(pieces, answers, strict=True):
                    found[piece.index].append(answer)
            return [_joined(answers) for answers in found]

        return finish

    def example(self) -> GraphRequest:
        """The first row of the artifact's record, or all of it where rows cannot be told apart."""
        rows = slice(0, 1 if self._joins else self._settings.max_batch_size) if self._config.batched else ...
        return self.prepare({spec.name: self._recorded[spec.name][rows] for spec in self._config.inputs})

    def _rows_are_independent(self) -> bool:
        """Whether a row's answer is the same without the others: a network may normalise over its batch."""
        pair = {name: value[:2] for name, value in self._recorded.items()}
        if len(next(iter(pair.values()))) < 2:
            return True
        rows = [{name: value[at : at + 1] for name, value in pair.items()} for at in range(2)]
        session, config = self._threads.alone, self._config
        try:
            together, *alone = [run_graph(session, config, given) for given in (pair, *rows)]
            joined = {name: np.concatenate([each[name] for each in alone]) for name in together}
            return graph_differences(("together", "alone"), together, joined, config)[0].mean <= APART
        except Exception as error:  # the classes of ONNX Runtime share no base; a batch of one may not run
            log.info("rows cannot be computed one by one: %s", error)
            return False

    def _parts(self, requests: Sequence[GraphRequest]) -> Iterator[list[_Piece]]:
        """What runs at once: rows of one shape, whoever sent them; or a request, where rows cannot be told apart."""
        if not self._joins:
            yield from ([_Piece(index, request, slice(0, request.rows))] for index, request in enumerate(requests))
            return
        kinds: dict[Any, list[tuple[int, GraphRequest]]] = {}
        for index, request in enumerate(requests):
            kinds.setdefault(request.kind, []).append((index, request))
        for members in kinds.values():
            for part in self._threads.parts(sum(request.rows for _, request in members), PART):
                yield list(_pieces(members, part))

    def _run(self, session: Any, pieces: list[_Piece]) -> list[Answer]:
        """The rows of each piece, or why there are none; pieces whose company fails are computed alone."""
        inputs: list[dict[str, NDArray[Any]] | RequestError] = [self._inputs(piece) for piece in pieces]
        good = [each for each in inputs if not isinstance(each, RequestError)]
        if len(good) < len(pieces) or len(pieces) == 1:
            return [each if isinstance(each, RequestError) else self._compute(session, each) for each in inputs]
        joined = {name: np.concatenate([each[name] for each in good]) for name in good[0]}
        answer = self._compute(session, joined)
        if isinstance(answer, PenjingError):
            return [self._compute(session, each) for each in good]
        ends = np.cumsum([piece.rows.stop - piece.rows.start for piece in pieces])[:-1]
        apart = {name: np.split(value, ends) for name, value in answer.items()}
        return [{name: values[at] for name, values in apart.items()} for at in range(len(pieces))]

    def _inputs(self, piece: _Piece) -> dict[str, NDArray[Any]] | RequestError:
        request, first, pixels = piece.request, self._config.inputs[0], self._config.pixels
        rows = piece.rows if self._config.batched else slice(None)
        found = {name: array[rows] if self._config.batched else array for name, array in request.arrays.items()}
        if pixels is None or first.name in found:
            return found
        given = None if request.pixels is None else request.pixels[rows]
        if given is None:
            decoded = []
            for at in range(len(request.images))[rows]:
                try:
                    image = decode_image(request.images[at], pixels, max_pixels=self._settings.max_image_pixels)
                except InputError as error:
                    named = " (it is the name of a file: send what the file holds)" * _names_file(request.images[at])
                    return RequestError(f"image {at} of the request cannot be read: {error}{named}")
                decoded.append(arranged(image, pixels))
            given = np.stack(decoded) if len(first.shape) == 4 else decoded[0]
        return {first.name: network_input(given, pixels, first.dtype), **found}

    def _compute(self, session: Any, inputs: Mapping[str, NDArray[Any]]) -> Answer:
        try:
            return run_graph(session, self._config, inputs)
        except Exception as error:  # the classes of ONNX Runtime share no base
            return RequestError(f"the network cannot compute these values or sizes: {runtime_says(error)}")


def _names_file(image: bytes) -> bool:
    return image[-6:].lower().endswith((b".png", b".jpg", b".jpeg", b".webp", b".bmp")) and image.isascii()


def image_inputs(config: GraphConfig) -> tuple[str, ...]:
    """Names of what may be given in place of the first input where that is an image: `pixels`, and encoded images."""
    pixels, first = config.pixels, config.inputs[0]
    if pixels is None or len(first.shape) not in ((4,) if config.batched else (3, 4)):
        return ()
    size, channels = (pixels.height, pixels.width), (len(pixels.mean),)
    wanted = channels + size if pixels.layout == "NCHW" else size + channels
    if any(isinstance(axis, int) and axis != size for axis, size in zip(first.shape[-3:], wanted, strict=True)):
        return ()
    own = {spec.name for spec in config.inputs}
    return tuple(name if name not in own else f"penjing_{name}" for name in (PIXELS, IMAGE))


def text_input(config: GraphConfig) -> str:
    """The name by which texts may be given in place of all inputs, where the network has a tokenizer."""
    return TEXT if TEXT not in {spec.name for spec in config.inputs} else f"penjing_{TEXT}"


def pixel_spec(config: GraphConfig) -> TensorSpec:
    """The first input as pixels."""
    return config.inputs[0].model_copy(update={"name": image_inputs(config)[0], "dtype": "uint8"})


def _pieces(members: Sequence[tuple[int, GraphRequest]], part: slice) -> Iterator[_Piece]:
    """What `part` of all rows of `members`, one after the other, holds of each."""
    begin = 0
    for index, request in members:
        low, high = max(part.start, begin), min(part.stop, begin + request.rows)
        if low < high:
            yield _Piece(index, request, slice(low - begin, high - begin))
        begin += request.rows


def _joined(answers: Sequence[Answer]) -> Answer:
    rows: list[dict[str, NDArray[Any]]] = []
    for answer in answers:
        if isinstance(answer, PenjingError):
            return answer
        rows.append(answer)
    return rows[0] if len(rows) == 1 else {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def _bytes(array: NDArray[Any]) -> int:
    if array.dtype != np.object_:
        return array.nbytes
    return sum(len(value) if isinstance(value, (bytes, str)) else 0 for value in array.flat)
