"""What a decoder sees with as a Triton model of its own, `sight`: pictures in, the rows that stand for them out.

The decoder's model asks it while its answers go on (`penjing.serve.triton.eyes`). Both have the same folder: a decoder
that sees, or its artifact. Pictures of several requests go through the network in one batch, each with the bits that it
has alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import RequestError
from penjing.core.family import sees
from penjing.serve.client.protocol import DECODER, SIGHT
from penjing.serve.engine.config import BatchConfig, EngineConfig
from penjing.serve.families.base import Answer, Arrays, BatchPart, Entry, Signature, TensorSpec
from penjing.serve.families.graph_model import PIXELS
from penjing.serve.families.repository import ARTIFACT_FOLDER, ENTRIES, write_decoder_entry, write_python_entry

if TYPE_CHECKING:
    from penjing.core.vision.sight import SightConfig
    from penjing.serve.sight.eyes import Rows

ROWS = "rows"
NICE = 10  # its threads leave a processor to those of the decoder, whose every step all running answers wait for


def signature(config: SightConfig) -> Signature:
    """`pixels` (height, width, channels) uint8 → `rows`, those of the decoder's width that stand for a picture."""
    side = config.vision.image_size
    return Signature(
        SIGHT,
        (TensorSpec(PIXELS, "UINT8", (side, side, config.vision.num_channels)),),
        (),
        (TensorSpec(ROWS, "FP32", (config.rows, config.width)),),
    )


def batches_of(settings: EngineConfig) -> BatchConfig:
    """How pictures are joined, by the settings of the decoder."""
    return BatchConfig(max_batch_size=settings.image_batch, threads=settings.image_threads)


class SightModel:
    """A `BatchModel`.

    Args:
        folder: of the decoder; every hash is checked.

    Raises:
        InputError: damaged, or it sees nothing.
    """

    def __init__(self, folder: Path, settings: BatchConfig) -> None:
        from penjing.core.checkpoint.load import load_sight_of
        from penjing.serve.sight.eyes import Eyes

        sight = load_sight_of(folder)
        self._shape = signature(sight.config).inputs[0].shape
        self._eyes = Eyes(sight, settings.threads, NICE)

    def prepare(self, inputs: Arrays) -> NDArray[np.uint8]:
        """See `BatchModel`."""
        if set(inputs) != {PIXELS}:
            raise RequestError(f"give {PIXELS} alone, got {', '.join(sorted(inputs)) or 'nothing'}")
        pictures = inputs[PIXELS]
        if pictures.dtype != np.uint8 or pictures.shape[1:] != self._shape or not len(pictures):
            shape = ", ".join(map(str, self._shape))
            raise RequestError(f"{PIXELS} must be uint8 of shape (N, {shape}), got {pictures.dtype} {pictures.shape}")
        return pictures

    def start(self, requests: Sequence[NDArray[np.uint8]], begun: Callable[[], None]) -> Callable[[], Sequence[Answer]]:
        """See `BatchModel`."""
        self._eyes.call(begun)
        waiting = iter(self._eyes.start([picture for request in requests for picture in request]))
        rows = [[next(waiting) for _ in request] for request in requests]
        return lambda: [_answer(each) for each in rows]

    def example(self) -> NDArray[np.uint8]:
        """A black picture."""
        return np.zeros((1, *self._shape), np.uint8)


def _answer(rows: Sequence[Future[Rows]]) -> Answer:
    return {ROWS: np.stack([each.result().numpy() for each in rows])}


def repository(folder: Path, settings: EngineConfig, scratch: Path) -> Path:
    """That of a decoder, beside what it sees with where it does and `settings` ask for it."""
    if not (settings.image_model and sees(folder)):
        return ENTRIES
    shutil.rmtree(scratch, ignore_errors=True)
    write_decoder_entry(scratch / DECODER, None, {SIGHT: SIGHT})
    _write(scratch / SIGHT, folder, settings, {})
    return scratch


def decoder_entry(folder: Path, settings: EngineConfig) -> Entry:
    """The same for another server."""
    parameters = {"engine": settings.model_dump_json(exclude_unset=True)}
    if not (settings.image_model and sees(folder)):
        return Entry(partial(write_decoder_entry, model=folder, parameters=parameters))
    shared = {"model": f"../{DECODER}/{ARTIFACT_FOLDER}"}
    return Entry(
        partial(write_decoder_entry, model=folder, parameters=parameters | {SIGHT: SIGHT}),
        f"the model {SIGHT} beside it computes images: load both",
        {SIGHT: partial(_write, model=folder, settings=settings, parameters=shared)},
    )


def _write(folder: Path, model: Path, settings: EngineConfig, parameters: dict[str, str]) -> None:
    from penjing.core.checkpoint.load import sight_config_of

    config = batches_of(settings)
    parameters = parameters | {"engine": config.model_dump_json(exclude_unset=True)}
    write_python_entry(folder, signature(sight_config_of(model)), config, code=SIGHT, parameters=parameters)


PART = BatchPart(SIGHT, BatchConfig, SightModel)
