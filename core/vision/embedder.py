"""Two towers for inference: images and texts → vectors that may be compared.

Each image and each text is computed by itself and on one thread, several beside each other, so that the bits of a
vector depend on nothing else: neither on its company nor on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.images.decode import FORMATS, MAX_PIXELS, arranged, decode_image, network_input
from penjing.core.text.text_tokenizer import TextTokenizer, TextTokens, as_texts, pad
from penjing.core.vision.towers_config import TowersConfig

Vector = Vectors = NDArray[np.float32]


class Embedder:
    """Two towers on the CPU; `load_embedder` opens a folder.

    Args:
        see: normalised images (N, C, H, W) float32 → vectors (N, D) of length 1, on the thread that calls.
        read: tokens of texts → vectors, likewise.
        threads: rows that are computed beside each other; 0: one for each core.
    """

    def __init__(
        self,
        config: TowersConfig,
        see: Callable[[Vectors], Vectors],
        read: Callable[[TextTokens], Vectors],
        tokenizer: TextTokenizer,
        threads: int = 0,
    ) -> None:
        self._network_of_images, self._network_of_texts = see, read
        self.config, self.tokenizer = config, tokenizer
        self.pixels = self.config.pixels
        # torch counts threads for each thread that asks it.
        self._pool = ThreadPoolExecutor(
            threads or len(os.sched_getaffinity(0)), "penjing-towers", torch.set_num_threads, (1,)
        )

    def embed_images(self, images: bytes | Sequence[bytes] | NDArray[np.uint8], max_pixels: int = MAX_PIXELS) -> Vector:
        """(images, D) float32 vectors of length 1.

        Args:
            images: JPEG or PNG files, or a single one, or uint8 (N, C, height, width) at the size of `config`, not
                normalised.
            max_pixels: of a file; a larger one is refused before it is decoded.

        Raises:
            InputError: there is no image, one cannot be read, which it names, or another shape or type.
        """
        if not isinstance(images, np.ndarray):
            files = list(images) if isinstance(images, Iterable) and not isinstance(images, str | bytes) else [images]
            for number, file in enumerate(files):
                if not isinstance(file, bytes):
                    said = f"image {number} is {type(file).__name__}"
                    raise InputError(f"{said}; give the bytes of files, as open(path, 'rb').read() gives them")
            return self._together([self.of_file(data, max_pixels) for data in files], "image")
        shape = (self.config.channels, *self.config.image_size)
        if images.dtype != np.uint8 or images.shape[1:] != shape:
            sides = ", ".join(map(str, shape))
            raise InputError(f"images are {images.dtype} of shape {images.shape}; give uint8 of shape (N, {sides})")
        return self._together([self.of_pixels(image) for image in images], "image")

    def embed_texts(self, texts: str | Sequence[str]) -> Vector:
        """(texts, D) float32 vectors of length 1; a single text gives one row, a long one is cut.

        Raises:
            InputError: there is no text.
        """
        return self._together(self.of_texts(as_texts(texts)), "text")

    def of_file(self, data: bytes, max_pixels: int = MAX_PIXELS) -> Future[Vector]:
        """The vector (D,) of a JPEG or PNG; the future raises InputError for one that cannot be read."""
        return self._pool.submit(lambda: self._see(self._decoded(data, max_pixels)))

    def of_pixels(self, image: NDArray[np.uint8]) -> Future[Vector]:
        """The vector (D,) of (C, height, width) uint8."""
        return self._pool.submit(self._see, image)

    def of_texts(self, texts: list[str]) -> list[Future[Vector]]:
        """The vector (D,) of each text."""
        return [self._pool.submit(self._read, row) for row in self.tokenizer.rows(texts)]

    def call(self, what: Callable[[], None]) -> None:
        """Run `what` on one of the threads, behind the rows that were given before."""
        self._pool.submit(what)

    def _decoded(self, data: bytes, max_pixels: int) -> NDArray[np.uint8]:
        image = decode_image(data, self.pixels, max_pixels=max_pixels, formats=FORMATS, still=True)
        return arranged(image, self.pixels)

    def _see(self, image: NDArray[np.uint8]) -> Vector:
        values = np.ascontiguousarray(network_input(image[None], self.pixels))
        return self._network_of_images(values)[0]

    def _read(self, row: list[int]) -> Vector:
        return self._network_of_texts(pad([row]))[0]

    @staticmethod
    def _together(vectors: Sequence[Future[Vector]], what: str) -> Vector:
        if not vectors:
            raise InputError(f"there is no {what} to embed; give one or more")
        found = []
        for number, vector in enumerate(vectors):
            try:
                found.append(vector.result())
            except InputError as error:
                raise InputError(f"{what} {number} cannot be read: {error}") from None
        return np.stack(found)
