"""Errors on the wire: one table of codes and exceptions, which the served model and its clients both read."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from penjing.core.errors import (
    InputError,
    OverloadedError,
    PenjingError,
    RequestError,
    ServerError,
    UnavailableError,
)
from penjing.core.progress import plural

_CONNECTION = ("failed to connect", "socket closed", "connection reset", "connection refused", "broken pipe", "goaway")
_NOT_LOADED = ("not healthy", "no available versions", "is not ready", "server is stopping", "server not ready")
_OTHER_MODEL = ("is not found", "decoupled transaction policy", "missing required input")  # than the one called for
_WHAT_IS_THERE = (
    "a model of another name or kind is served there, and 'penjing server status' shows what runs; "
    "Client(ADDRESS, model=NAME) asks it by its name"
)
_NO_ID = "[request id: <id_unknown>] "
_QUEUE_FULL = "exceeds maximum queue size"  # of a queue in the server, in front of another backend
_RETRY = re.compile(r"retry in (\d+(?:\.\d+)?) s")


class Code(NamedTuple):
    """How a kind of error travels.

    Attributes:
        name: of the gRPC status; the message of an error response begins with it, since a stream carries it without its
            code, and Triton server's codes are fewer.
        server: the same in Triton server's `TritonError`, or the nearest that it has.
        causes: what the served model raises.
        error: what the client raises.
        transient: a client may try again as long as nothing has come.
    """

    name: str
    server: str
    causes: tuple[type[Exception], ...]
    error: type[PenjingError]
    transient: bool


CODES = (
    Code("INVALID_ARGUMENT", "INVALID_ARG", (RequestError, InputError), RequestError, transient=False),
    Code("UNAVAILABLE", "UNAVAILABLE", (UnavailableError,), UnavailableError, transient=True),
    Code("RESOURCE_EXHAUSTED", "UNAVAILABLE", (OverloadedError,), OverloadedError, transient=True),
    Code("INTERNAL", "INTERNAL", (Exception,), ServerError, transient=False),
)
"""Looked up from the first on: an error has the first code that names it among its causes."""
BY_NAME = {code.name: code for code in CODES}


def code_of(error: BaseException) -> Code:
    """How `error`, which a served model has raised, travels."""
    return next((code for code in CODES if isinstance(error, code.causes)), CODES[-1])


def message_of(error: BaseException) -> str:
    """The message of the error response for `error`."""
    return f"{code_of(error).name}: {error}"


class CallFailedError(Exception):
    """A call failed with `error`; `transient` failures may be tried again as long as no token has come."""

    def __init__(self, error: PenjingError, transient: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.transient = transient


def refused(message: str) -> CallFailedError:
    """The failure behind an error message inside a response.

    On the header `triton_grpc_error` Triton server would end the stream with a status code instead, but version 2.51 at
    times dies of an assertion then (about one error in 200), so this header is not sent.
    """
    name, _, text = message.partition(": ")
    if (code := BY_NAME.get(name)) is not None:
        return CallFailedError(_error(code, text), code.transient)
    if any(words in message.lower() for words in _NOT_LOADED):
        return CallFailedError(UnavailableError(message), transient=True)
    if any(words in message for words in _OTHER_MODEL):
        message = f"{message.removeprefix(_NO_ID).rstrip('. ')}; {_WHAT_IS_THERE}"
    return CallFailedError(ServerError(message), transient=False)


def _error(code: Code, text: str) -> PenjingError:
    found = _RETRY.search(text)
    if code.error is OverloadedError:
        return OverloadedError(text, retry_after=float(found[1]) if found else None)
    return code.error(text)


def broken(error: Any, server: str, num_tokens: int) -> CallFailedError:
    """The failure behind a `grpc.RpcError` that came after `num_tokens` tokens."""
    import grpc

    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = f"{server} did not finish within the timeout; {plural(num_tokens, 'token')} had come"
    elif code is grpc.StatusCode.UNAVAILABLE and num_tokens:
        text = f"the connection to {server} broke after {plural(num_tokens, 'token')}; ask again"
    elif code is grpc.StatusCode.UNAVAILABLE:
        text = f"no server answers at {server}; start one with 'penjing serve MODEL' ({details})"
        return CallFailedError(UnavailableError(text), transient=True)
    elif code is grpc.StatusCode.CANCELLED:
        text = "the request was cancelled"
    else:
        text = f"{server}: {details or code.name}"
    return CallFailedError(ServerError(text), transient=code is grpc.StatusCode.UNAVAILABLE)


def call_failed(error: Any, server: str) -> CallFailedError:
    """The failure behind a `grpc.RpcError` of a unary call."""
    import grpc

    status, details = error.code(), error.details() or ""
    details = details.removeprefix(_NO_ID).partition(" NOTE: ")[0]
    name, _, rest = details.partition(": ")
    code = BY_NAME.get(name)
    details = details if code is None else rest
    words = details.lower()
    if code is None and _QUEUE_FULL in words:
        code = BY_NAME["RESOURCE_EXHAUSTED"]
    elif code is None and status is not grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own: a message is too large
        code = BY_NAME.get(status.name)
    if "batch-size must be <=" in words:
        details += ": send fewer rows in a request, or serve with --set max_batch_size=N"
    if code is not None and code.error is RequestError:
        return CallFailedError(RequestError(details), code.transient)
    if code is not None and code.transient and not any(word in words for word in _CONNECTION):
        return CallFailedError(_error(code, f"{server}: {details}; try again later"), code.transient)
    if status is grpc.StatusCode.NOT_FOUND or any(each in details for each in _OTHER_MODEL):
        return CallFailedError(ServerError(f"{server}: {details}; {_WHAT_IS_THERE}"), transient=False)
    return broken(error, server, 0)
