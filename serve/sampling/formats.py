"""Dates and times of a JSON schema as patterns that every reader takes.

llguidance's own forms follow RFC 3339 to the letter: a 60th second, a small "z", the 29th of February of any year.
Python's `datetime` reads none of these, and no calendar has the last. What is written here is a part of RFC 3339, so
that an answer still fulfils its schema.
"""

from __future__ import annotations

from typing import Any

_YEAR = r"([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = r"(0[1-9]|1[0-9]|2[0-8])"
_MONTHS = rf"((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = rf"({_YEAR}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

_SCHEMA = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def with_readable_times(schema: Any) -> Any:
    """`schema` with a pattern in place of each `format` of `PATTERNS`; values that stand in it (`enum`, `const`) are as
    they are."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name in _SCHEMA:
        if name in found:
            found[name] = with_readable_times(found[name])
    for name in _SCHEMAS:
        if isinstance(found.get(name), list):
            found[name] = [with_readable_times(each) for each in found[name]]
    for name in _NAMED:
        if isinstance(found.get(name), dict):
            found[name] = {key: with_readable_times(each) for key, each in found[name].items()}
    kind, all_of = found.get("format"), found.get("allOf", [])
    if isinstance(kind, str) and kind in PATTERNS and isinstance(all_of, list):
        del found["format"]
        found["allOf"] = [*all_of, {"pattern": PATTERNS[kind]}]
    return found
