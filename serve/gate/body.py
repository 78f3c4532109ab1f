"""The body of a request as it comes: JSON that was announced as such, with nothing in it that no text or number has."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from penjing.core.errors import UTF16_MARKS
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.fields import Part, explained
from penjing.serve.gate.finite import is_finite

B = TypeVar("B", bound=Part)
NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def read_body(kind: type[B], content_type: str, body: bytes) -> B:
    """The body of a request.

    Raises:
        ApiError: it is no JSON, not of this kind, or has characters that no text has; names the field and the rule.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise _not_announced(content_type)
    try:
        # It bounds depth and the length of numbers, and refuses what is no UTF-8 and lone surrogates.
        values = from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)  # which RFC 8259 lets a reader pass over
    except ValueError as error:
        if body[:2] in UTF16_MARKS:
            raise ApiError(400, "The body is UTF-16; send JSON as UTF-8.", code="invalid_json") from None
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    if not is_finite(values, body):
        raise ApiError(400, "The body has a number that 64-bit floating point cannot hold.", code="invalid_json")
    if NUL.search(body):
        raise ApiError(400, "The body has a NUL character, which no text has.", code="invalid_json")
    values = {name: _whole(value) for name, value in values.items()}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explained(kind, values, error.errors(include_url=False)) from None


def _whole(value: Any) -> Any:
    """JSON has one kind of number, so that 5.0 is an integer; also in a list."""
    if isinstance(value, list):
        return [_whole(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63 else value


def _not_announced(content_type: str) -> ApiError:
    """Only with this header does a browser ask before it sends what a page of another origin wants sent."""
    given = f"The content-type is {content_type[:80]!r}" if content_type else "There is no content-type"
    hint = "with curl: --json '{...}', or -d '{...}' -H 'content-type: application/json'"
    text = f"{given}; send JSON with the header content-type: application/json ({hint})."
    return ApiError(415, text, code="unsupported_media_type")
