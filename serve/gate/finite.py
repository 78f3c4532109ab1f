"""Numbers that JSON can write and that 64-bit floating point cannot hold, such as 1e999: read, they are infinite."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

_MAYBE = re.compile(rb"[eE]\+?[0-9]|[0-9]{309}")
"""Without an exponent a number needs 309 digits to be infinite."""


def is_finite(values: Any, source: bytes) -> bool:
    """Whether each number of `values`, which were read from the JSON `source`, is finite."""
    return _MAYBE.search(source) is None or _is_finite(values)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def finite(value: Any) -> Any:
    """`value`, as it is read from JSON, with the largest number for one that is infinite."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return math.copysign(sys.float_info.max, value) if isinstance(value, float) and math.isinf(value) else value
