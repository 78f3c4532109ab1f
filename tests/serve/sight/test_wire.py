"""Images as requests bring them."""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np
import pytest

from penjing.core.errors import RequestError
from penjing.serve.sight.wire import from_data_url, read_images

FILE = b"\x89PNG" + bytes(range(256))


@pytest.mark.parametrize("written", [base64.b64encode, base64.encodebytes])
def test_base64_may_have_lines(written: Callable[[bytes], bytes]) -> None:
    """As `base64` of a shell and `encodebytes` write it, and the vLLM backend takes it."""
    assert read_images(np.array([written(FILE), FILE], object)) == (FILE, FILE)
    assert from_data_url(f"data:image/png;base64,{written(FILE).decode()}") == FILE
    with pytest.raises(RequestError, match="image 0 is neither a JPEG or PNG file nor one in base64"):
        read_images(np.array([b"?" + written(FILE)], object))
