"""The objects of a request's body; which field is wrong, as the client wrote it, and why: pydantic's errors as one of
ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import ErrorDetails

from penjing.serve.gate.errors import ApiError

Location = tuple[int | str, ...]
MAX_SHOWN = 80
_CACHED = "Is not used: prompts are cached."
_OF_A_NAME = "[key]"
"""What a location ends with if the name itself is wrong."""


class Part(BaseModel):
    """Any object in a body. JSON has types of its own, so none is guessed: `"5"` is no number.

    An unknown field is an error, unless it is null: clients that write all of their fields ask for nothing by it.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        nothing = {name for name, value in values.items() if value is None and name not in known}
        # The same object wherever it can be: errors are traced to where the body has it.
        return {name: value for name, value in values.items() if name not in nothing} if nothing else values


class Unused(Part):
    """What clients of OpenAI's say about a request that changes no answer: it is taken, and nothing is done with it."""

    metadata: dict[str, Any] | None = Field(default=None, description="Is not used.")
    store: bool | None = Field(default=None, description="Is not done.")
    service_tier: str | None = Field(default=None, description="Is not used.")
    safety_identifier: str | None = Field(default=None, description="Is not used.")
    prompt_cache_key: str | None = Field(default=None, description=_CACHED)
    prompt_cache_retention: str | None = Field(default=None, description=_CACHED)
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description=_CACHED)


class CacheMarks(Part):
    """An object of a prompt that Anthropic's and OpenAI's clients mark as the end of what is worth keeping. No template
    sees it."""

    cache_control: dict[str, Any] | None = Field(default=None, exclude=True, description=_CACHED)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(default=None, exclude=True, description=_CACHED)


class _Fault(NamedTuple):
    entry: ErrorDetails
    at: Location
    is_name: tuple[bool, ...]
    """Of each part of `at`: it is a name or a place in the body, and not what pydantic calls a member of a union."""

    def names(self, begin: int = 0) -> Location:
        """From this part on."""
        return tuple(part for part, is_name in zip(self.at[begin:], self.is_name[begin:], strict=True) if is_name)


def explained(kind: type[BaseModel], values: dict[str, Any], errors: Sequence[ErrorDetails]) -> ApiError:
    """The first wrong field. Of one that may have several types it is told what is wrong with the type that was meant.

    Args:
        values: of the body, which is no `kind`.
    """
    fault = _first([_Fault(entry, entry["loc"], _which_are_names(entry, values)) for entry in errors])
    entry, names = fault.entry, [str(name) for name in fault.names()]
    param = ".".join(names)
    if entry["type"] == "extra_forbidden":
        known = f"; there are {', '.join(sorted(kind.model_fields))}" if len(names) == 1 else ""
        text = f"There is no field {param!r:.{MAX_SHOWN}}{known}."
        return ApiError(400, text, code="unknown_field", param=param[:MAX_SHOWN])
    if entry["type"] == "union_tag_not_found":  # an object without the field that says what it is
        param += "." + entry.get("ctx", {})["discriminator"].strip("'")
    if entry["type"] in ("missing", "union_tag_not_found"):
        return ApiError(400, f"The field {param!r} is missing.", code="missing_field", param=param)
    if entry["type"] == "value_error":  # one of ours
        return ApiError(400, f"{param}: {entry.get('ctx', {})['error']}.", code="invalid_value", param=param)
    value = entry["input"]
    if entry["type"] == "union_tag_invalid":  # it says that it is what is not known
        name = entry.get("ctx", {})["discriminator"].strip("'")
        param, value = f"{param}.{name}", value[name]
    given = json.dumps(value, default=str)
    given = given if len(given) <= MAX_SHOWN else f"{given[: MAX_SHOWN - 3]}..."
    rule = _rule(entry)
    return ApiError(400, f"{param}: {rule[0].lower()}{rule[1:]}, not {given}.", code="invalid_value", param=param)


def _rule(entry: ErrorDetails) -> str:
    """What is wrong, in words of JSON and not of pydantic."""
    context = entry.get("ctx", {})
    if entry["type"] == "none_required":
        return "input should be null"
    if entry["type"] == "union_tag_invalid":
        return f"input should be one of {context['expected_tags']}"
    return entry["msg"].partition(" after validation")[0]  # behind it stands a list's length, which is no rule


def _first(faults: list[_Fault]) -> _Fault:
    """The first, with a choice wherever there is a union, each of whose members says why it is not meant."""
    at = 0
    while at < len(faults[0].at):
        groups: dict[int | str, list[_Fault]] = {}
        for fault in faults:
            if at < len(fault.at):
                groups.setdefault(fault.at[at], []).append(fault)
        if faults[0].is_name[at]:
            faults = groups[faults[0].at[at]]
        else:
            faults = max(groups.values(), key=lambda member: _fit(member[0], at))
        at += 1
    return faults[0]


def _fit(fault: _Fault, at: int) -> tuple[list[int], bool]:
    """How far the body is what a union's member takes, by the first fault, and whether its type is right there."""
    places = [name if isinstance(name, int) else 0 for name in fault.names(at)]
    return places, not fault.entry["type"].endswith("_type")


def _which_are_names(entry: ErrorDetails, values: dict[str, Any]) -> tuple[bool, ...]:
    """Of each part of a location: those that lead from the body to what the error is about."""
    loc, given = entry["loc"], entry["input"]
    if entry["type"] == "missing":
        behind, ends = (True,), lambda value: value is given
    elif loc[-2:] == (given, _OF_A_NAME):
        behind, ends = (True, False), lambda value: isinstance(value, dict) and given in value
    else:
        behind, ends = (), lambda value: value is given
    found = _leads(loc[: len(loc) - len(behind)], values, ends)
    return tuple(index == 0 for index in range(len(loc))) if found is None else found + behind


def _leads(loc: Location, value: Any, ends: Callable[[Any], bool]) -> tuple[bool, ...] | None:
    """Which parts of `loc` are names, so that these lead from `value` to something that `ends`. A union's member may be
    called as a name beside it is."""
    if not loc:
        return () if ends(value) else None
    part, rest = loc[0], loc[1:]
    if isinstance(part, int):
        return _behind(True, rest, value[part], ends) if isinstance(value, list) and part < len(value) else None
    found = _behind(True, rest, value[part], ends) if isinstance(value, dict) and part in value else None
    return found or _behind(False, rest, value, ends)


def _behind(is_name: bool, rest: Location, value: Any, ends: Callable[[Any], bool]) -> tuple[bool, ...] | None:
    found = _leads(rest, value, ends)
    return None if found is None else (is_name, *found)
