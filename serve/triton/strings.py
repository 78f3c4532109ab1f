"""Texts of requests as Triton server's Python backend hands them over: one that nobody will read is not copied."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from penjing.core.errors import RequestError

LENGTH = struct.Struct("<I")


class TooLong(NamedTuple):
    """Stands in a tensor for a text of `num_bytes`, which has been left where it lay."""

    num_bytes: int


def read_strings(encoded: np.ndarray, most: int) -> np.ndarray:
    """The elements of a TYPE_STRING tensor.

    Args:
        encoded: uint8, each element behind its length in four bytes, little-endian.
        most: bytes of an element that is copied; of a longer one there is a `TooLong`.

    Returns: objects, (elements,): `bytes` or `TooLong`.
    """
    found: list[bytes | TooLong] = []
    view = encoded.data.cast("B")
    offset = 0
    while offset < len(view):
        (length,) = LENGTH.unpack_from(view, offset)
        offset += LENGTH.size
        if offset + length > len(view):
            raise ValueError(f"a text of {length} bytes does not fit a tensor of {len(view)}")
        found.append(bytes(view[offset : offset + length]) if length <= most else TooLong(length))
        offset += length
    array = np.empty(len(found), np.object_)
    for index, each in enumerate(found):  # numpy would take a tuple apart
        array[index] = each
    return array


def refuse_too_long(name: str, array: np.ndarray, most: int) -> None:
    """Check a tensor that `read_strings` may have made.

    Raises:
        RequestError: a text of it has more than `most` bytes.
    """
    if array.dtype == np.object_:
        for value in array.flat:
            if isinstance(value, TooLong):
                raise RequestError(f"{name} has {value.num_bytes} bytes, at most {most} are read: shorten it")


def bound_strings(pb_utils: Any, most: int) -> None:
    """Let the Python backend read texts by `read_strings` from now on. Its own function copies each under the lock that
    all threads share: a text of 1 GB, which came as a megabyte of gzip, took so long that nothing else showed life."""
    pb_utils.deserialize_bytes_tensor = lambda encoded: read_strings(encoded, most)
