"""Widths in bits, and rounding to them."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import Field, field_validator
from torch import Tensor

from penjing.compress.sensitivity.study import Samples
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError
from penjing.kernels.rounding import round_clamp_


class Widths(Config):
    """Widths in bits, growing narrower, and the samples that are measured on; `data` as of a sensitivity to pruning."""

    widths: tuple[int, ...] = Field(default=(8, 6, 4), min_length=1)
    data: Samples = "calibration"

    @field_validator("widths")
    @classmethod
    def _widths(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 2 <= value <= 16 for value in values) or list(values) != sorted(set(values), reverse=True):
            raise ValueError("each from 16 to 2, falling, such as 8,6,4")
        return values


S = TypeVar("S", bound=Widths)


def parse_widths(kind: type[S], values: dict[str, Any]) -> S:
    """The settings of `kind` that flags amount to; `widths` as "8,6,4".

    Raises:
        ConfigError: a value out of range.
    """
    try:
        widths = [int(text) for text in values["widths"].split(",")]
    except ValueError:
        raise ConfigError(f"--widths {values['widths']}: write whole numbers with commas, as 8,6,4") from None
    return parse_config(kind, values | {"widths": widths}, "sensitivity")


def round_rows(x: Tensor, bits: int) -> Tensor:
    """Each row (…, K) rounded symmetrically to `bits` by its largest magnitude, and widened again."""
    limit = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim=-1, keepdim=True) / limit
    scale = scale.masked_fill(scale == 0, 1.0)
    return round_clamp_(x / scale, limit) * scale
