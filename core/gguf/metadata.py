"""What a GGUF file says of itself, under the names of its architecture: checked numbers, and its rotary scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.config import C, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.gguf.names import LLAMA3_FIELDS, LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, YARN_FIELDS
from penjing.core.layers.settings import RopeScaling
from penjing.core.models.rope import yarn_magnitudes


class Metadata:
    """The metadata of one file, and its tensors of rotary divisors.

    Attributes:
        path: the file.
        fields: metadata, key → value (numbers, text, lists).
    """

    def __init__(self, path: Path, fields: dict[str, Any], architecture: str) -> None:
        self.path, self.fields, self._architecture = path, fields, architecture
        self._tensors: Mapping[str, Any] = {}

    def _field(self, key: str, default: Any = None) -> Any:
        value = self.fields.get(f"{self._architecture}.{key}", default)
        if value is None:
            raise InputError(f"{self.path} lacks the metadata {self._architecture}.{key}; get a complete file")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._field(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{self.path}: {key} must be a number (got {value!r})")
        return float(value)

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._field(key, default)
        return self._one(value if isinstance(value, list) else [value], key)

    def _one(self, values: list[Any], key: str) -> int:
        """The number of all layers."""
        if len(set(values)) != 1:
            raise InputError(f"{self.path}: {key} differs from layer to layer, which is not supported")
        if not isinstance(values[0], int):
            raise InputError(f"{self.path}: {key} must be a whole number (got {values[0]!r})")
        return values[0]

    def _parse(self, config_type: type[C], values: dict[str, Any]) -> C:
        try:
            return parse_config(config_type, values, str(self.path))
        except ConfigError as error:
            raise InputError(str(error)) from None

    def _rope_scaling(self, rotary: int, scalings: frozenset[str], truncate: bool) -> RopeScaling:
        """The scaling of `rotary` rotated dimensions, one of `scalings`; of YaRN whether it blends between whole pairs
        is not in the file."""
        kind = self._field("rope.scaling.type", "none")
        factors = self._tensors.get(ROPE_FACTORS)
        if factors is not None:
            kind = "llama3"
        elif LONG_FACTORS in self._tensors and kind in ("none", "yarn"):
            kind = "longrope"  # Phi-3's files have the factors alone
        known = {"none": "default"}.get(kind, kind)
        if known not in scalings:
            names = ", ".join(["none", *sorted(scalings - {"default"})])
            raise InputError(
                f"{self.path}: rotary scaling {kind!r} of {self._architecture} is not supported; supported: {names}"
            )
        if known == "llama3":
            if factors is None:
                raise InputError(f"{self.path}: rotary scaling 'llama3' lacks {ROPE_FACTORS}; get a complete file")
            return self._llama3_scaling(np.array(factors.data, dtype=np.float64), rotary)
        if known == "linear":
            return self._parse(RopeScaling, {"rope_type": "linear", "factor": self._field("rope.scaling.factor")})
        if known == "yarn":
            return self._yarn_scaling(truncate)
        return self._longrope() if known == "longrope" else RopeScaling()

    def _yarn_scaling(self, truncate: bool) -> RopeScaling:
        """llama.cpp's YaRN is that of transformers; what rotated queries and keys are multiplied by follows from the
        factor, times attn_factor. Of yarn_attn_factor, the network's own, llama.cpp reads nothing."""
        plain = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
        for name, usual in plain.items():
            if (value := self._real(f"rope.scaling.{name}", usual)) != usual:
                raise InputError(f"{self.path}: rotary scaling 'yarn' with {name}={value} is not supported")
        defaults = {name: getattr(RopeScaling(), name) for name in ("beta_fast", "beta_slow")}
        values = {ours: self._field(f"rope.scaling.{name}", defaults.get(ours)) for name, ours in YARN_FIELDS.items()}
        made = self._parse(RopeScaling, {"rope_type": "yarn", "truncate": truncate, **values})
        times, own = self._real("rope.scaling.attn_factor", 1.0), self._real("rope.scaling.yarn_attn_factor", 1.0)
        if times == own == 1.0:
            return made
        usual = yarn_magnitudes(made)[0] if own == 1.0 else own
        return self._parse(RopeScaling, made.model_dump() | {"attention_factor": usual * times})

    def _longrope(self) -> RopeScaling:
        """Which of the two lists llama.cpp rotates by follows from the context that it is started with, as here."""
        factors: dict[str, tuple[float, ...]] = {}
        for field, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
            if name not in self._tensors:
                raise InputError(f"{self.path}: rotary scaling 'longrope' lacks {name}; get a complete file")
            factors[field] = tuple(np.array(self._tensors[name].data, dtype=np.float64).tolist())
        original = self._number("rope.scaling.original_context_length", self._number("context_length"))
        attention = self._real("rope.scaling.attn_factor", 1.0)
        values = {"original_max_position_embeddings": original, "attention_factor": attention, **factors}
        return self._parse(RopeScaling, {"rope_type": "longrope", **values})

    def _llama3_scaling(self, factors: np.ndarray, rotary: int) -> RopeScaling:
        """Llama 3.1's settings from the divisors: every published model uses 1, 4 and 8192 and differs in `factor`.
        Files of ours say them."""
        stated = {
            ours: self.fields.get(f"{self._architecture}.rope.scaling.{name}") for name, ours in LLAMA3_FIELDS.items()
        }
        given = {name: value for name, value in stated.items() if value is not None}
        values = {"rope_type": "llama3", "factor": max(float(factors.max()), 1.0)} | given
        scaling = self._parse(RopeScaling, values)
        wavelength = 2 * math.pi * self._real("rope.freq_base", 10000.0) ** (np.arange(0, rotary, 2) / rotary)
        turns = scaling.original_max_position_embeddings / wavelength
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = ((turns - scaling.low_freq_factor) / (span or 1.0)).clip(0, 1)
        expected = 1 / ((1 - smooth) / scaling.factor + smooth)
        if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
            raise InputError(f"{self.path}: its rotary factors are not Llama 3's; this scaling is not supported")
        return scaling
