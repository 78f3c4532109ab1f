"""Images of requests: which tokens of a prompt they take, and the rows that stand there, each image computed once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penjing.core.errors import InputError, RequestError
from penjing.core.progress import plural
from penjing.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penjing.core.images.tiles import Grid
    from penjing.core.vision.sight import Sight, SightConfig

_Read = TypeVar("_Read")
Compute = Callable[[Sequence[Any]], Sequence[Any]]
"""Pictures (height, width, channels) uint8 → the rows (R, hidden) float32 of each. Any thread calls it."""


class Limits(Protocol):
    """Of the engine's settings, those of images."""

    @property
    def max_images(self) -> int: ...
    @property
    def max_image_bytes(self) -> int: ...
    @property
    def max_image_pixels(self) -> int: ...
    @property
    def image_cache_bytes(self) -> int: ...


class ImageError(RequestError):
    """An image of a request is at fault.

    Attributes:
        number: which, from 0.
        why: what comes behind its name in a sentence.
    """

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"image {number} {why}")
        self.number, self.why = number, why


@dataclass(frozen=True)
class Placed:
    """An image, or a piece of one, in a prompt: row i stands in place of token `start` + i.

    `digest` is of the pixels as the model sees them, `rows` (count, hidden) float32.
    """

    start: int
    count: int
    digest: bytes
    rows: Any

    @property
    def end(self) -> int:
        """Where the tokens behind it begin."""
        return self.start + self.count


class Images:
    """Images of an engine's requests; any thread may use it.

    An image that was seen lately is not computed again; one that is being computed is waited for.

    Args:
        sight: None for a model that takes no images.
    """

    def __init__(self, sight: Sight | None, tokenizer: Tokenizer, limits: Limits) -> None:
        self._limits = limits
        self._sight: SightConfig | None = None
        self._compute: Compute | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Future[Any]] = OrderedDict()
        self._num_bytes = 0
        self.num_computed = 0
        """Images that went through the network so far."""
        self.token: str | None = None
        """What stands in a text for an image; None: the model takes none."""
        self._token_id = self._rows = -1
        self._tokenizer = tokenizer
        if sight is not None:
            from penjing.serve.sight.eyes import Eyes

            self._sight, self._compute = sight.config, Eyes(sight)
            self._token_id, self._rows = sight.config.image_token_id, sight.config.rows
            self.token = tokenizer.id_to_token(self._token_id)
            if self.token is None:
                raise InputError(f"the tokenizer has no token {self._token_id}, which stands for images; import again")

    def elsewhere(self, compute: Compute) -> None:
        """Have pictures computed by another, such as another process, which has the same network; it is not kept here.
        Before the first request."""
        self._compute = compute

    def begin(self, prompt: str, count: int) -> str:
        """The prompt, behind the places of `count` images where it has none."""
        return prompt if self.token is None or self.token in prompt else self.token * count + prompt

    def expand(self, prompt: str, images: Sequence[bytes]) -> str:
        """The text with as many image tokens as each image has rows, where it had one.

        Raises:
            RequestError: other numbers of images and of their places, or too many or too large images, or one that the
                model would cut into squares and whose size cannot be read.
        """
        if not images and (self.token is None or self.token not in prompt):
            return prompt
        if self._sight is None or self.token is None:
            raise RequestError("this model takes no images: leave them out, or ask a model that sees")
        places = prompt.count(self.token)
        if places != len(images):
            raise RequestError(
                f"{self.token} stands {plural(places, 'time')} in the prompt, and "
                f"{plural(len(images), 'image')} came with it; one for each is needed"
            )
        if len(images) > self._limits.max_images:
            raise RequestError(
                f"the request has {len(images)} images, at most {self._limits.max_images} are taken (max_images)"
            )
        for number, image in enumerate(images):
            if len(image) > self._limits.max_image_bytes:
                raise ImageError(
                    number,
                    f"has {len(image):,} bytes, at most {self._limits.max_image_bytes:,} are read (max_image_bytes): "
                    "shrink it",
                )
        from penjing.core.vision.sight import image_text

        first, *others = prompt.split(self.token)
        texts = [image_text(self._tokenizer, self.token, self._rows, grid) for grid in self._grids(images)]
        return first + "".join(text + other for text, other in zip(texts, others, strict=True))

    def places(self, prompt_ids: Sequence[int], images: Sequence[bytes]) -> tuple[int, ...]:
        """Where each piece of the images begins in a prompt whose text `expand` gave.

        Raises:
            RequestError: image tokens stand in the prompt that belong to no image.
        """
        if self._sight is None:
            return ()
        where = [place for place, token in enumerate(prompt_ids) if token == self._token_id]
        if len(where) != self._rows * sum(grid.pieces for grid in self._grids(images)):
            raise RequestError(
                f"the prompt has the token {self.token!r}, which stands for an image, {plural(len(where), 'time')}, "
                f"and {plural(len(images), 'image')} came with it; give images with a text that has it once for each"
            )
        starts = where[:: self._rows]
        if any(where[n * self._rows + self._rows - 1] != start + self._rows - 1 for n, start in enumerate(starts)):
            raise RequestError(f"the tokenizer splits the tokens of an image, {self.token!r}; import the model again")
        return tuple(starts)

    def see(self, starts: Sequence[int], images: Sequence[bytes]) -> tuple[Placed, ...]:
        """The pieces of images that begin there, each computed if it was not seen lately.

        Raises:
            RequestError: one cannot be read.
        """
        assert self._sight is not None
        from penjing.core.vision.sight import pictures_of

        read = partial(pictures_of, self._sight)
        pictures = [
            piece
            for number, image in enumerate(images)
            for piece in _read(number, read, image, self._limits.max_image_pixels)
        ]
        digests = [blake2b(picture.tobytes(), digest_size=16).digest() for picture in pictures]
        rows = self._rows_of(dict(zip(digests, pictures, strict=True)))
        return tuple(Placed(start, self._rows, each, rows[each]) for start, each in zip(starts, digests, strict=True))

    def _grids(self, images: Sequence[bytes]) -> list[Grid]:
        assert self._sight is not None
        from penjing.core.vision.sight import grid_of_file

        read, most = partial(grid_of_file, self._sight), self._limits.max_image_pixels
        return [_read(number, read, image, most) for number, image in enumerate(images)]

    def _rows_of(self, pictures: Mapping[bytes, Any]) -> dict[bytes, Any]:
        """The rows of each picture by its digest; those that nobody has seen or computes are computed together."""
        mine: dict[bytes, Future[Any]] = {}
        found: dict[bytes, Future[Any]] = {}
        with self._lock:
            for digest in pictures:
                if digest not in self._kept:
                    self._kept[digest] = mine[digest] = Future()
                self._kept.move_to_end(digest)
                found[digest] = self._kept[digest]
        if mine:
            self._fill(mine, pictures)
        return {digest: future.result() for digest, future in found.items()}

    def _fill(self, mine: Mapping[bytes, Future[Any]], pictures: Mapping[bytes, Any]) -> None:
        assert self._compute is not None
        try:
            rows = self._compute([pictures[digest] for digest in mine])
        except BaseException as error:
            with self._lock:
                for digest in mine:
                    del self._kept[digest]
            for future in mine.values():
                future.set_exception(error)
            raise
        with self._lock:
            self.num_computed += len(mine)
            for future, each in zip(mine.values(), rows, strict=True):
                self._num_bytes += each.nbytes
                future.set_result(each)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        for digest, future in list(self._kept.items()):
            if self._num_bytes <= self._limits.image_cache_bytes:
                return
            if future.done():
                del self._kept[digest]
                self._num_bytes -= future.result().nbytes


def _read(number: int, read: Callable[[bytes, int], _Read], data: bytes, max_pixels: int) -> _Read:
    try:
        return read(data, max_pixels)
    except InputError as error:
        raise ImageError(number, f"cannot be read: {error}") from None
