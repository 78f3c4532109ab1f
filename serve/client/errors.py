"""Errors on the wire: one table of codes and exceptions, which the served model and its clients both read."""

from __future__ import annotations

from typing import Any, NamedTuple

from penjing.core.errors import InputError, OverloadedError, PenjingError, RequestError, ServerError

_CONNECTION = ("failed to connect", "socket closed", "connection reset", "connection refused", "broken pipe", "goaway")
_NOT_LOADED = ("not healthy", "no available versions", "is not ready")


class Code(NamedTuple):
    """How a kind of error travels.

    Attributes:
        name: of the gRPC status; the message of an error response in a stream begins with it, since a stream carries it
            without its code.
        server: the same in Triton server's `TritonError`.
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
    Code("UNAVAILABLE", "UNAVAILABLE", (OverloadedError,), OverloadedError, transient=True),
    Code("INTERNAL", "INTERNAL", (Exception,), ServerError, transient=False),
)
"""Looked up from the first on: an error has the first code that names it among its causes."""
BY_NAME = {code.name: code for code in CODES}


def code_of(error: BaseException) -> Code:
    """How `error`, which a served model has raised, travels."""
    return next((code for code in CODES if isinstance(error, code.causes)), CODES[-1])


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
        return CallFailedError(code.error(text), code.transient)
    return CallFailedError(ServerError(message), transient=any(words in message for words in _NOT_LOADED))


def broken(error: Any, server: str, num_tokens: int) -> CallFailedError:
    """The failure behind a `grpc.RpcError` that came after `num_tokens` tokens."""
    import grpc

    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = f"{server} did not finish within the timeout; {num_tokens} tokens had come"
    elif code is grpc.StatusCode.UNAVAILABLE and num_tokens:
        text = f"the connection to {server} broke after {num_tokens} tokens; ask again"
    elif code is grpc.StatusCode.UNAVAILABLE:
        text = f"no server answers at {server}; start one with 'penjing serve MODEL' ({details})"
    elif code is grpc.StatusCode.CANCELLED:
        text = "the request was cancelled"
    else:
        text = f"{server}: {details or code.name}"
    return CallFailedError(ServerError(text), transient=code is grpc.StatusCode.UNAVAILABLE)


def call_failed(error: Any, server: str) -> CallFailedError:
    """The failure behind a `grpc.RpcError` of a unary call."""
    import grpc

    status, details = error.code(), error.details() or ""
    details = details.removeprefix("[request id: <id_unknown>] ").partition(" NOTE: ")[0]
    words = details.lower()
    if "batch-size must be <=" in words:
        details += ": send fewer rows in a request, or serve with --set max_batch_size=N"
    code = BY_NAME.get(status.name)
    if code is not None and code.error is RequestError:
        return CallFailedError(RequestError(details), code.transient)
    if code is not None and code.error is OverloadedError and not any(word in words for word in _CONNECTION):
        return CallFailedError(OverloadedError(f"{server}: {details}; try again later"), code.transient)
    if status is grpc.StatusCode.NOT_FOUND:
        text = f"{server}: {details}; 'penjing serve ARTIFACT' serves one"
        return CallFailedError(ServerError(text), transient=False)
    return broken(error, server, 0)
