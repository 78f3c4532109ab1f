"""JSON schemas that nobody wrote by hand, each with an end: what a record of a program might look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, time
from random import Random
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

NAMES = ("id", "name", "kind", "height", "age", "tags", "planted", "owner", "e-mail", "position", "größe", 'the "pot"')
PATTERNS = (
    "^[A-Z]{2}-[0-9]{3}$",
    "^(oak|pine|maple)s?$",
    "^#[0-9a-f]{6}$",
    "^[a-z]+(-[a-z]+)?$",
    r"^\+?\d{1,3} \d{4}$",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email")
FREE = "^[a-z]+(-[a-z]+)?$"
DEPTH = 3

CHECKER = FormatChecker(["date", "uuid", "ipv4", "ipv6", "email"])
for name, read in {"time": time.fromisoformat, "date-time": datetime.fromisoformat}.items():
    CHECKER.checks(name, ValueError)(lambda text, read=read: not isinstance(text, str) or read(text) is not None)


def make_schema(number: int) -> dict[str, Any]:
    """The schema of this number, always the same: an object at the top, as OpenAI's interface asks.

    It has what programs ask for: enumerations, constants, nested objects with required and optional properties, lists
    and tuples, whole numbers and fractions with bounds and multiples, texts with lengths, patterns and formats, unions
    of types and of schemas, and references to definitions.
    """
    draw = Random(number)
    definitions = {f"part{index}": _any(draw, DEPTH - 1, ()) for index in range(draw.randint(0, 2))}
    schema = _object(draw, 0, tuple(definitions))
    return schema | {"$defs": definitions} if definitions else schema


def fault(text: str, schema: dict[str, Any]) -> str | None:
    """What is wrong with an answer by a validator that is not ours, formats included; None where nothing is.

    Raises:
        ValueError: it is not JSON.
    """
    error = next(Draft202012Validator(schema, format_checker=CHECKER).iter_errors(json.loads(text)), None)
    return None if error is None else f"{error.json_path}: {error.message}"


def _any(draw: Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    kinds = list(_LEAVES)
    if depth < DEPTH:
        kinds += ["object", "array", "tuple", "union"] * 3
    if known:
        kinds += ["reference"] * 4
    kind = draw.choice(kinds)
    if kind == "reference":
        return {"$ref": f"#/$defs/{draw.choice(known)}"}
    return _LEAVES[kind](draw) if kind in _LEAVES else _NESTED[kind](draw, depth, known)


def _object(draw: Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(2 if depth == 0 else 0, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth + 1, known) for name in names},
        "required": [name for name in names if draw.random() < 0.8],
        "additionalProperties": False,
    }


def _array(draw: Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    least = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth + 1, known),
        "minItems": least,
        "maxItems": least + draw.randint(0, 2),
    }


def _tuple(draw: Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    parts = [_any(draw, depth + 1, known) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(draw: Random, depth: int, known: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_any(draw, depth + 1, known) for _ in range(draw.randint(2, 3))]}


def _string(draw: Random) -> dict[str, Any]:
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(1, 12)}


def _pattern(draw: Random) -> dict[str, Any]:
    pattern = draw.choice(PATTERNS)
    return {"type": "string", "pattern": pattern} | ({"maxLength": 12} if pattern == FREE else {})


def _integer(draw: Random) -> dict[str, Any]:
    low = draw.randint(-500, 500)
    lowest = draw.choice(("minimum", "exclusiveMinimum"))
    return {"type": "integer", lowest: low, "maximum": low + draw.randint(1, 5000)}


def _number(draw: Random) -> dict[str, Any]:
    low = draw.randint(-20, 20) / 4
    highest = draw.choice(("maximum", "exclusiveMaximum"))
    return {"type": "number", "minimum": low, highest: low + draw.randint(1, 40) / 4, "multipleOf": 0.25}


_LEAVES: dict[str, Callable[[Random], dict[str, Any]]] = {
    "string": _string,
    "pattern": _pattern,
    "format": lambda draw: {"type": "string", "format": draw.choice(FORMATS), "maxLength": 40},
    "integer": _integer,
    "multiple": lambda draw: {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": draw.choice((3, 5, 25))},
    "number": _number,
    "boolean": lambda draw: {"type": "boolean"},
    "types": lambda draw: {"type": [draw.choice(("boolean", "null")), "string"], "maxLength": 8},
    "enum": lambda draw: {"enum": draw.sample(["oak", "pine", 1, 2.5, None, True, 'a "b"', "ä\n"], draw.randint(2, 5))},
    "const": lambda draw: {"const": draw.choice(["tree", 7, False, None])},
}
_NESTED: dict[str, Callable[[Random, int, tuple[str, ...]], dict[str, Any]]] = {
    "object": _object,
    "array": _array,
    "tuple": _tuple,
    "union": _union,
}
