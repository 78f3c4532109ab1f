"""What the parity record of a text encoder holds."""

from __future__ import annotations

import numpy as np
import pytest

from penjing.core.artifact.onnx_encoder import cosine_difference
from penjing.core.artifact.parity import SERVED
from penjing.core.errors import InputError

BETWEEN = ("onnxruntime", SERVED)


def test_equal_embeddings_have_no_distance_and_others_that_of_their_cosine() -> None:
    """`penjing compress verify --server` said 6e-7 of vectors that it called equal bit for bit: rounded lengths."""
    rows = np.random.default_rng(0).standard_normal((64, 384)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    same = cosine_difference(BETWEEN, rows, rows.copy())
    assert (same.largest, same.mean) == (0.0, 0.0)
    one = rows.copy()
    one[5, 0] = np.nextafter(one[5, 0], np.float32(2))
    assert cosine_difference(BETWEEN, rows, one).largest > 0
    other = np.roll(rows, 1, axis=0)
    expected = 1 - (rows.astype(np.float64) * other).sum(1)
    found = cosine_difference(BETWEEN, rows, other)
    assert (found.largest, found.mean) == pytest.approx((expected.max(), expected.mean()), abs=1e-6)
    with pytest.raises(InputError, match="onnxruntime or served_endpoint computes NaN or infinity"):
        cosine_difference(BETWEEN, rows, np.full_like(rows, np.nan))
