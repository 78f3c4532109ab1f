"""`/openapi.json`: the front's paths and bodies as OpenAPI 3.1, made of what the front itself checks them with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from penjing.serve.front.bodies import Body
from penjing.serve.gate.errors import MESSAGES

REFS = "#/components/schemas/{model}"
NAMED, MESSAGES_NAMED = "ApiError", "MessageError"
TEXT_TYPE, EVENTS_TYPE, JSON_TYPE = "text/plain", "text/event-stream", "application/json"
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `penjing keys add`."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}
_TEXT = {"type": "string"}
_OPTIONAL = {"type": ["string", "null"]}
ANSWERS: dict[str, dict[str, Any]] = {
    JSON_TYPE: {"schema": {"type": "object"}},
    TEXT_TYPE: {"schema": _TEXT},
    EVENTS_TYPE: {},  # OpenAPI 3.1 has no words for a sequence: some readers hold each event to a schema given here
}
"""By type of the answer."""
ERROR = {
    "type": "object",
    "description": "OpenAI's error object.",
    "additionalProperties": False,
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "additionalProperties": False,
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _OPTIONAL, "code": _OPTIONAL},
        }
    },
}

MESSAGE_ERROR = {
    "type": "object",
    "description": "Anthropic's error object.",
    "additionalProperties": False,
    "required": ["type", "error", "request_id"],
    "properties": {"type": {"const": "error"}, "request_id": _TEXT} | ERROR["properties"],
}


class Described(NamedTuple):
    """One path: `body` is None where it takes none; `types` are those of its answers; `is_open` needs no key."""

    path: str
    summary: str
    body: type[Body] | None = None
    types: tuple[str, ...] = (JSON_TYPE,)
    is_open: bool = False


def describe(paths: Iterable[Described], *, keys: bool) -> dict[str, Any]:
    """An OpenAPI document of `paths`.

    Args:
        keys: whether the front asks for one.
    """
    paths = list(paths)
    bodies = [(each.body, "validation") for each in paths if each.body is not None]
    _, schemas = models_json_schema(bodies, ref_template=REFS)  # type: ignore[arg-type]
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "penjing", "version": version("penjing")},
        "paths": {each.path.replace(":path}", "}"): _operations(each) for each in paths},
        "components": {"schemas": schemas.get("$defs", {}) | {NAMED: ERROR, MESSAGES_NAMED: MESSAGE_ERROR}},
    }
    if keys:
        found["components"]["securitySchemes"] = KEYS
        found["security"] = [{name: []} for name in KEYS]
    return found


def _operations(path: Described) -> dict[str, Any]:
    name = MESSAGES_NAMED if path.path.startswith(MESSAGES) else NAMED
    error = {"content": {JSON_TYPE: {"schema": {"$ref": REFS.format(model=name)}}}}
    schemas = {kind: ANSWERS[kind] for kind in path.types}
    operation: dict[str, Any] = {
        "summary": path.summary,
        "responses": {
            "200": {"description": "The answer.", "content": schemas},
            "4XX": {"description": "The request is refused.", **error},
            "5XX": {"description": "The model is not ready, too slow, or has failed.", **error},
        },
    }
    if path.is_open:
        operation["security"] = []
        operation["responses"].pop("5XX")
        operation["responses"]["503"] = {"description": "Not ready.", "content": schemas}
    if "{name" in path.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
    if path.body is None:
        return {"get": operation}
    reference = {"$ref": REFS.format(model=path.body.__name__)}
    operation["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": reference}}}
    return {"post": operation}
