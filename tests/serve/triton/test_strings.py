"""Texts of requests, against Triton's own client: read as it wrote them, and left alone where they are too long."""

from __future__ import annotations

import json
import struct
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from tritonclient.utils import serialize_byte_tensor

from penjing.core.errors import RequestError
from penjing.serve.triton.strings import TooLong, bound_strings, read_strings, refuse_too_long
from penjing.serve.triton.tensors import read_call


def encoded(*texts: bytes) -> np.ndarray:
    return np.frombuffer(serialize_byte_tensor(np.array(texts, np.object_)).item(), np.uint8)


@pytest.mark.parametrize("texts", [(b"",), (b"a", b"\0b" * 9, b""), ("ü".encode() * 1000,)])
def test_texts_are_those_that_were_written(texts: tuple[bytes, ...]) -> None:
    found = read_strings(encoded(*texts), 1 << 20)
    assert (found.dtype, found.tolist()) == (np.object_, list(texts))


def test_a_text_that_is_too_long_is_not_copied() -> None:
    tensor = encoded(b"short", b"a" * (8 << 20), b"x" * 10)
    tracemalloc.start()
    found = read_strings(tensor, 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tolist() == [b"short", TooLong(8 << 20), b"x" * 10]
    assert peak < 1 << 20
    with pytest.raises(RequestError, match="messages has 8388608 bytes, at most 10"):
        refuse_too_long("messages", found, 10)
    refuse_too_long("messages", found[:1], 10)
    refuse_too_long("numbers", np.zeros(3), 10)


def test_a_tensor_that_ends_early_is_refused() -> None:
    for cut in (3, 2):
        with pytest.raises((ValueError, struct.error), match=r"does not fit|requires a buffer"):
            read_strings(encoded(b"abc")[:-cut] if cut == 2 else encoded(b"")[:3], 10)


def test_the_backend_reads_by_it_and_the_request_is_refused() -> None:
    backend = SimpleNamespace(deserialize_bytes_tensor=None)
    bound_strings(backend, 100)
    text = backend.deserialize_bytes_tensor(encoded(b"a" * 101)).reshape([1])
    with pytest.raises(RequestError, match="text_input has 101 bytes, at most 100 are read"):
        read_call({"text_input": text}, json.dumps({}), 100)


def test_token_ids_are_counted_before_they_become_numbers_of_python() -> None:
    endless = np.broadcast_to(np.int32(1), (1 << 40,))
    with pytest.raises(RequestError, match="has 1099511627776 token ids, at most 100 are read"):
        read_call({"prompt_token_ids": endless}, json.dumps({}), 100)
