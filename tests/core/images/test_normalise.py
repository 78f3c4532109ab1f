"""Pixels become the floats of the formula, bit for bit, whichever axis counts the channels."""

from __future__ import annotations

import numpy as np
import pytest

from penjing.core.images.normalise import normalise

MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


@pytest.mark.parametrize(("shape", "axis"), [((2, 3, 5, 4), 1), ((2, 3, 5, 4), -3), ((5, 4, 3), -1)])
def test_it_is_the_formula(shape: tuple[int, ...], axis: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    before = images.copy()
    found = np.moveaxis(normalise(images, MEAN, STD, axis=axis), axis, -1)
    expected = (np.moveaxis(before, axis, -1).astype(np.float32) / np.float32(255) - MEAN) / STD
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
    assert np.array_equal(images, before)


def test_pixels_may_have_another_scale() -> None:
    images = np.array([[0, 127, 255]], np.uint8)
    assert normalise(images, [127.5] * 3, [1.0] * 3, scale=1).tolist() == [[-127.5, -0.5, 127.5]]
