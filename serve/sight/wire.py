"""Images on their way to an engine: the tensor of a request, `data:` URLs, and parts of chat messages."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.errors import InputError, RequestError

FILES = (b"\xff\xd8", b"\x89PNG", b"RIFF")  # how a JPEG, a PNG and a WAV begin
_DATA_URL = re.compile(r"data:image/(?:jpeg|jpg|png);base64,", re.IGNORECASE)


def read_image(path: Path) -> bytes:
    """The content of an image's file.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"the image {path} cannot be read: {error.strerror}") from None


def read_images(tensor: np.ndarray) -> tuple[bytes, ...]:
    """The files in the input `image`: JPEG, PNG or WAV as they are, or in base64 as for Triton server's vLLM backend.

    Raises:
        RequestError: it holds no bytes.
    """
    images = []
    for number, value in enumerate(tensor.reshape(-1).tolist()):
        if not isinstance(value, bytes):
            if isinstance(value, tuple):  # a `TooLong` of `penjing.serve.triton.strings`
                raise RequestError(f"image {number} has {value[0]:,} bytes, more than are read: shrink it")
            raise RequestError(f"image must be a TYPE_STRING tensor, got {type(value).__name__}")
        images.append(value if value.startswith(FILES) else _from_base64(value, number))
    return tuple(images)


def from_data_url(url: str) -> bytes:
    """The file in a `data:` URL.

    Raises:
        RequestError: it is another URL, which is not fetched, or holds no base64.
    """
    found = _DATA_URL.match(url)
    if found is None:
        raise RequestError(
            f"an image must come as data:image/jpeg;base64,... or data:image/png;base64,..., which {url[:40]!r} is "
            "not; addresses are not fetched"
        )
    return _from_base64(url[found.end() :].encode("utf-8", "replace"), 0)


def with_places(messages: list[dict[str, Any]], token: str | None, form: str) -> list[dict[str, Any]]:
    """Chat messages whose parts {"type": "image"} are texts of the image token; as they are where the template, of the
    `form` that it says, takes parts and writes the token itself.

    Raises:
        RequestError: the model has no such token: it takes no images.
    """
    placed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(map(_is_image, content)):
            if token is None:
                raise RequestError("this model takes no images: leave them out, or ask a model that sees")
            written: Any = {"type": "text", "text": token} if form == "text" else {"type": "image"}
            parts: Sequence[Any] = [written if _is_image(part) else part for part in content]
            message = {**message, "content": parts}
        placed.append(message)
    return placed


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _from_base64(value: bytes, number: int) -> bytes:
    try:
        return base64.b64decode(value.translate(None, b"\r\n"), validate=True)  # clients wrap lines
    except (binascii.Error, ValueError):
        raise RequestError(f"image {number} is neither a JPEG or PNG file nor one in base64") from None
