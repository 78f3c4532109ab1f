"""Dates and times of a schema: what is allowed is what Python's own `datetime` reads; no value of a schema moves."""

from __future__ import annotations

from datetime import date, datetime, time
from random import Random
from typing import Any

import pytest

from penjing.serve.sampling.formats import with_readable_times
from penjing.serve.sampling.guided import Guided
from tests.serve.tiny import tiny_engine, tiny_model

DAYS = ("2024-02-29", "2000-02-29", "0004-02-29", "9999-12-31", "0001-01-01", "2023-04-30")
NO_DAYS = ("2023-02-29", "1900-02-29", "0000-01-01", "0000-02-29", "2023-02-30", "2023-04-31", "2023-13-01")
TIMES = ("00:00:00Z", "23:59:59+14:00", "12:30:00.5-05:30", "12:30:00.123456Z")
NO_TIMES = ("23:59:60Z", "24:00:00Z", "12:30:00z", "12:30Z", "12:30:00", "12:30:00.Z", "12:60:00Z")
READERS: dict[str, Any] = {
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "date-time": datetime.fromisoformat,
}


@pytest.fixture(scope="module")
def constraints() -> Any:
    return tiny_engine(tiny_model()).constraints


def allows(constraints: Any, schema: dict[str, Any], text: str) -> bool:
    constraint = constraints.make(Guided(kind="json_schema", value=schema))
    ids = list(f'"{text}"'.encode())
    return constraint.num_allowed(ids) == len(ids)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("date", DAYS, NO_DAYS),
        ("time", TIMES, NO_TIMES),
        ("date-time", [f"{day}T{TIMES[1]}" for day in DAYS], [f"{day}T{TIMES[0]}" for day in NO_DAYS]),
        ("date-time", [f"{DAYS[0]}T{each}" for each in TIMES], [f"{DAYS[0]}T{each}" for each in NO_TIMES]),
    ],
)
def test_times_are_those_that_datetime_reads(constraints: Any, kind: str, good: Any, bad: Any) -> None:
    schema = {"type": "string", "format": kind}
    for text in good:
        READERS[kind](text)
        assert allows(constraints, schema, text), text
    assert [text for text in bad if allows(constraints, schema, text)] == []


def test_every_day_of_a_calendar_is_allowed_and_no_other(constraints: Any) -> None:
    draw = Random(0)
    for _ in range(400):
        text = f"{draw.choice((1900, 2000, 2023, 2024, 9996)):04}-{draw.randint(1, 12):02}-{draw.randint(28, 32):02}"
        try:
            date.fromisoformat(text)
            exists = True
        except ValueError:
            exists = False
        assert allows(constraints, {"format": "date"}, text) == exists, text


def test_a_pattern_or_a_length_beside_it_still_counts(constraints: Any) -> None:
    for more in ({"pattern": "^2024"}, {"pattern": "^2024", "allOf": [{"maxLength": 10}]}):
        schema = {"type": "string", "format": "date", **more}
        assert allows(constraints, schema, "2024-02-29")
        assert not allows(constraints, schema, "2023-02-28")
        assert not allows(constraints, schema, "2024-02-30")


def test_only_schemas_are_changed() -> None:
    value = {"format": "date"}
    kept: dict[str, Any] = {
        "properties": {"format": {"const": value}, "const": {"enum": [value]}},
        "default": value,
        "format": "uuid",
    }
    assert with_readable_times(kept) == kept
    inside: dict[str, Any] = {
        "properties": {"enum": value},
        "$defs": {"day": value},
        "items": [value],
        "anyOf": [{"additionalProperties": value}],
    }
    assert "'format'" not in str(with_readable_times(inside))
    assert inside["$defs"] == {"day": value}, "the caller's own is as it was"
