"""How a request's tokens are chosen: the sampling parameters, with vLLM's names and defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from penjing.core.errors import RequestError
from penjing.serve.sampling.guided import DESCRIPTION, Guided

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
SEED_LIMIT = 2**63


class SamplingParams(BaseModel):
    """How tokens are chosen and when generation ends; names and defaults are vLLM's.

    The order is: repetition, presence and frequency penalties, `logit_bias`, the `min_tokens` mask, temperature, top-k,
    top-p, min-p (as transformers orders its warpers). Each field's description is the rule that its error message
    quotes.

    Raises:
        RequestError: from `from_json`; the constructor raises pydantic's ValidationError.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    n: int = Field(default=1, ge=1, le=64, description="an integer from 1 to 64")
    temperature: float = Field(default=1.0, ge=0, description="a number of at least 0 (0 is greedy)")
    top_k: int = Field(default=0, ge=-1, description="an integer of at least -1 (0 and -1 keep every token)")
    top_p: float = Field(default=1.0, gt=0, le=1, description="a number above 0 and at most 1")
    min_p: float = Field(default=0.0, ge=0, le=1, description="a number from 0 to 1")
    seed: int | None = Field(
        default=None, ge=-SEED_LIMIT, lt=SEED_LIMIT, description="a 64-bit signed integer (absent: a fresh one)"
    )
    repetition_penalty: float = Field(default=1.0, gt=0, description="a number above 0 (1 is none)")
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, description="a number from -2 to 2")
    logit_bias: dict[int, float] | None = Field(
        default=None, description='an object of token ids with numbers from -100 to 100, such as {"42": -100}'
    )
    stop: tuple[str, ...] = Field(
        default=(),
        max_length=MAX_STOP_STRINGS,
        description=f"a string or a list of at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters",
    )
    stop_token_ids: tuple[int, ...] = Field(default=(), description="a list of token ids of the model's vocabulary")
    include_stop_str_in_output: bool = Field(default=False, description="true or false")
    ignore_eos: bool = Field(default=False, description="true or false")
    max_tokens: int | None = Field(
        default=16, ge=1, description="an integer of at least 1, or null for as many as the context holds"
    )
    min_tokens: int = Field(default=0, ge=0, description="an integer from 0 to max_tokens")
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}, or null for none"
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}, or null for none"
    )
    guided: Guided | None = Field(default=None, description=DESCRIPTION)
    lora_name: str | None = Field(default=None, max_length=64, description="the name of an adapter, or null for none")
    skip_special_tokens: bool = Field(default=True, description="true or false")

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("stop")
    @classmethod
    def _stop_lengths(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not 1 <= len(text) <= MAX_STOP_LENGTH for text in value):
            raise ValueError("a stop string is empty or too long")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _ids_are_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(token < 0 for token in value):
            raise ValueError("a token id is negative")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias_range(cls, value: dict[int, float] | None) -> dict[int, float] | None:
        if any(token < 0 or not -100 <= bias <= 100 for token, bias in (value or {}).items()):
            raise ValueError("a bias or a token id is out of range")
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.min_tokens and self.guided is not None:
            raise ValueError("min_tokens cannot be combined with guided, whose form says where an answer may end")
        return self

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @classmethod
    def from_json(cls, source: str | bytes | Mapping[str, Any] | None) -> SamplingParams:
        """Read parameters as Triton's vLLM backend takes them: a JSON object, numbers and booleans also as strings,
        null for the default.

        Raises:
            RequestError: names every wrong field, its rule and the value; an unknown field lists the valid ones.
        """
        values = _as_object(source)
        prepared = {name: _from_text(cls, name, value) for name, value in values.items() if value is not None}
        if "max_tokens" in values and values["max_tokens"] is None:
            prepared["max_tokens"] = None
        try:
            return cls.model_validate(prepared)
        except ValidationError as error:
            # One line a field: a list with two bad entries gives two entries in `errors()`.
            lines = dict.fromkeys(_explain(cls, entry) for entry in error.errors())
            raise RequestError("; ".join(lines)) from None


def _as_object(source: str | bytes | Mapping[str, Any] | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, str | bytes):
        if not source.strip():
            return {}
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"sampling parameters are not valid JSON: {error}") from None
    if not isinstance(source, Mapping):
        raise RequestError(
            f'sampling parameters must be a JSON object such as {{"max_tokens": 64}}, got {source!r:.80}'
        )
    return {str(name): value for name, value in source.items()}


_INTEGERS = {"n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"}
_NUMBERS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}


def _from_text(cls: type[SamplingParams], name: str, value: Any) -> Any:
    """The value that a lenient JSON reader would see; what cannot be read stays as it is for validation to refuse."""
    try:
        if name in _INTEGERS:
            if isinstance(value, str):
                return int(value)
            return int(value) if isinstance(value, float) and value.is_integer() else value
        if name in _NUMBERS and isinstance(value, str):
            return float(value)
        if name == "guided" and isinstance(value, str):
            return json.loads(value)
        if name == "logit_bias":
            pairs = json.loads(value) if isinstance(value, str) else value
            return {int(token): float(bias) for token, bias in pairs.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return value
    field_info = cls.model_fields.get(name)
    if field_info is not None and field_info.annotation is bool and isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    return value


def _explain(cls: type[SamplingParams], entry: Any) -> str:
    if not entry["loc"]:  # the rule that spans two fields
        return str(entry["ctx"]["error"])
    name = str(entry["loc"][0])
    if name == "guided" and entry["type"] == "value_error":
        return f"sampling parameter {entry['ctx']['error']}"
    if entry["type"] == "extra_forbidden":
        return f"unknown sampling parameter {name!r}; valid: {', '.join(sorted(cls.model_fields))}"
    return f"sampling parameter {name} must be {cls.model_fields[name].description}, got {entry['input']!r:.80}"
