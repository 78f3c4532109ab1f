"""What goes wrong, in OpenAI's words: an error body and its status."""

from __future__ import annotations

import json
import math
from typing import Any

from penjing.core.errors import InputError, OverloadedError, PenjingError, RequestError, UnavailableError

RETRY_SECONDS = 1
START_SECONDS = 5  # until a server that starts or drains is worth another try
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
"""`type` by status; "invalid_request_error" for others."""
MESSAGES = "/v1/messages"
MESSAGES_TYPES = TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error", 504: "timeout_error"}
"""The same in Anthropic's words, below the path `MESSAGES`."""


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: whole sentences for whoever wrote the client.
        code: one word for a program, such as "model_not_found".
        param: the field of the body that is wrong.
        retry_after: whole seconds after which another try may succeed.
        headers: further ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @property
    def content(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """`content` as JSON; a lone surrogate of the client's stays an escape."""
        return json.dumps(self.content).encode()

    def for_messages(self, request_id: str) -> dict[str, Any]:
        """Anthropic's error object, with OpenAI's `param` and `code` in it."""
        kind = MESSAGES_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": self.content["error"] | {"type": kind}, "request_id": request_id}

    def told(self, path: str, request_id: str) -> bytes:
        """The body of the answer to a request for `path`."""
        if path != MESSAGES and not path.startswith(f"{MESSAGES}/"):
            return self.body
        return json.dumps(self.for_messages(request_id)).encode()


def starting() -> ApiError:
    """Nothing stands behind the front yet, or just now."""
    return ApiError(503, "The model is not ready; try again soon.", code="not_ready", retry_after=START_SECONDS)


def draining() -> ApiError:
    """No new requests are taken."""
    return ApiError(503, "The server is shutting down; ask another one.", code="draining", retry_after=START_SECONDS)


def failed() -> ApiError:
    """A defect of ours: the log says which, and the client gets no traceback."""
    return ApiError(500, "The server failed on this request.", code="internal_error")


def translated(error: PenjingError, hidden: dict[str, str]) -> ApiError:
    """The answer to a client for what our own client raised.

    Args:
        hidden: texts that are nobody's business, such as folders, and what to write for them.
    """
    text = str(error)
    for secret, shown in hidden.items():
        text = text.replace(secret, shown)
    if isinstance(error, RequestError | InputError):
        return ApiError(400, text, param=_parameter(text), code="invalid_value")
    if isinstance(error, OverloadedError):
        seconds = max(RETRY_SECONDS, math.ceil(error.retry_after or 0))
        return ApiError(429, f"The server is overloaded: {text}", code="overloaded", retry_after=seconds)
    if isinstance(error, UnavailableError):
        return starting()
    if "the connection to" in text:
        return ApiError(503, "The model went away; ask again.", code="not_ready", retry_after=START_SECONDS)
    if "within the timeout" in text:
        return ApiError(504, "The answer took too long; ask for fewer tokens.", code="timeout")
    return ApiError(500, "The model failed on this request; the server's log says why.", code="internal_error")


def _parameter(text: str) -> str | None:
    """The field that a message of the engine's names."""
    words = text.replace(":", " ").split()
    if words[:1] == ["guided"]:
        return "guided"
    if words[:2] == ["sampling", "parameter"] and len(words) > 2:
        return words[2]
    return "messages" if text.startswith("messages") else None
