"""Two towers behind a server: texts, encoded images or pixels become vectors that may be compared, in torch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.images.decode import MAX_PIXELS
from penjing.core.manifest import verify
from penjing.core.text.text_tokenizer import TextTokenizer
from penjing.core.vision.towers_config import TowersConfig
from penjing.serve.client.protocol import TOWERS
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families.base import Answer, Arrays, Entry, Family, Form, Signature, TensorSpec
from penjing.serve.families.batched import ask_for_life
from penjing.serve.families.encoder import TEXT, read_texts
from penjing.serve.families.graph_model import IMAGE, PIXELS
from penjing.serve.families.repository import write_python_entry

if TYPE_CHECKING:
    pass

OUTPUT = "embedding"
_INPUTS = (TEXT, IMAGE, PIXELS)


class TowersSettings(BatchConfig):
    """Settings of a batched model, and how large an image may be."""

    max_image_pixels: int = Field(
        default=MAX_PIXELS, ge=1, description="Pixels of an encoded image; a larger one is refused and not decoded."
    )


def signature(config: TowersConfig) -> Signature:
    """One of `text`, `image` and `pixels` gives `embedding`, row by row."""
    inputs = (
        TensorSpec(TEXT, "BYTES", (1,), optional=True),
        TensorSpec(IMAGE, "BYTES", (1,), optional=True),
        TensorSpec(PIXELS, "UINT8", (config.channels, *config.image_size), optional=True),
    )
    return Signature(TOWERS, inputs, (), (TensorSpec(OUTPUT, "FP32", (config.dimension,)),))


@dataclass(frozen=True)
class _Request:
    """Rows of one kind: texts, encoded images, or pixels (N, C, height, width)."""

    texts: list[str] | None = None
    files: Sequence[bytes] = ()
    pixels: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        return len(self.files if self.pixels is None else self.pixels) if self.texts is None else len(self.texts)


class Towers:
    """A `BatchModel`; a row's bits are those of `Embedder` in any other process.

    Args:
        folder: the checkpoint; every hash is checked.

    Raises:
        InputError: damaged, or of another kind.
    """

    def __init__(self, folder: Path, settings: TowersSettings) -> None:
        from penjing.core.artifact.towers import load_embedder

        self._embedder, self._most = load_embedder(folder, settings.threads), settings.max_image_pixels
        config = self._embedder.config
        self._shape = (config.channels, *config.image_size)

    def prepare(self, inputs: Arrays) -> _Request:
        """See `BatchModel`."""
        given = [name for name in _INPUTS if name in inputs]
        if len(given) != 1:
            raise RequestError(f"give one of {', '.join(_INPUTS)}, got {' and '.join(given) or 'none'}")
        array = inputs[given[0]]
        if given[0] == TEXT:
            return _Request(texts=read_texts(array))
        if given[0] == PIXELS:
            if array.dtype != np.uint8 or array.shape[1:] != self._shape or not len(array):
                shape = ", ".join(map(str, self._shape))
                raise RequestError(f"{PIXELS} must be uint8 of shape (N, {shape}), got {array.dtype} {array.shape}")
            return _Request(pixels=array.copy())
        if array.ndim != 2 or array.shape[1] != 1 or not len(array):
            raise RequestError(f"{IMAGE} must have the shape (N, 1) with N ≥ 1, one file a row, got {array.shape}")
        if not all(isinstance(value, bytes) for value in array.flat):
            raise RequestError(f"{IMAGE} must hold the bytes of encoded images")
        return _Request(files=tuple(array.flat))

    def start(self, requests: Sequence[_Request], begun: Callable[[], None]) -> Callable[[], list[Answer]]:
        """See `BatchModel`; what is wrong with one request is that one's alone."""
        self._embedder.call(begun)
        rows = [self._rows(request) for request in requests]
        return lambda: [_answer(each) for each in rows]

    def example(self) -> _Request:
        """One word: the tower of images is warm from the first image on."""
        return _Request(texts=["word"])

    def _rows(self, request: _Request) -> list[Future[NDArray[np.float32]]]:
        if request.texts is not None:
            return self._embedder.of_texts(request.texts)
        if request.pixels is not None:
            return [self._embedder.of_pixels(image) for image in request.pixels]
        return [self._embedder.of_file(data, self._most) for data in request.files]


def _answer(rows: Sequence[Future[NDArray[np.float32]]]) -> Answer:
    found = []
    for index, row in enumerate(rows):
        try:
            found.append(row.result())
        except InputError as error:
            return RequestError(f"image {index} of the request cannot be read: {error}")
    return {OUTPUT: np.stack(found)}


def _open(folder: Path) -> TowersConfig:
    config = towers_config(folder)
    verify(folder)
    TextTokenizer(folder, config.text)
    return config


def _check(folder: Path, _: TowersSettings) -> Path:
    _open(folder)
    return folder.absolute()


def _repository(folder: Path, settings: TowersSettings, scratch: Path) -> Path:
    shutil.rmtree(scratch, ignore_errors=True)
    write_python_entry(scratch / TOWERS, signature(_open(folder)), settings)
    return scratch


def _entry(folder: Path, settings: TowersSettings, form: Form | None) -> Entry:
    if form == "onnxruntime":
        raise ConfigError(
            f"{folder} holds two towers, which run in penjing's own code: leave --form out or take python"
        )
    made = signature(_open(folder))
    return Entry(partial(write_python_entry, signature=made, config=settings, artifact=folder))


FAMILY = Family(
    name=TOWERS,
    settings=TowersSettings,
    queued_by_server=True,
    check=_check,
    repository=_repository,
    entry=_entry,
    ask=ask_for_life,
    load=Towers,
)
