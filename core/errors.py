"""What penjing raises for a user: every message names the value, the rule and the next step.

PenjingError
├── ConfigError       a recipe, a setting or a flag is wrong
├── InputError        a file or folder that was handed in is missing, damaged or of another kind
├── RequestError      a generation request is invalid (names the field and its range)
├── OverloadedError   the engine's limits are reached; `retry_after` says in how many seconds to try again
├── SetupError        the machine lacks something (libpython, glibc, a free port, disk space, a network)
└── ServerError       a server did not answer, or answered with an error
    ├── BrokenEngineError what computes a model has ended under it; nothing can be computed until it is loaded again
    └── UnavailableError  there is none, or it loads, restarts or shuts down; try again later, or another one
"""

import json
import re

_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_PLACE = re.compile(r"/\S+\.(?:cc|h):\d+ [^()]*\([^()]*\)(?: const)? ")


class PenjingError(Exception):
    """Base of all errors meant for a user; the CLI prints it as one line and exits with `exit_code`."""

    exit_code = 1


class ConfigError(PenjingError):
    exit_code = 2


class InputError(PenjingError):
    exit_code = 3


class RequestError(PenjingError):
    exit_code = 4


class OverloadedError(PenjingError):
    exit_code = 5

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SetupError(PenjingError):
    exit_code = 6


class ServerError(PenjingError):
    exit_code = 7


class BrokenEngineError(ServerError):
    pass


class UnavailableError(ServerError):
    pass


def first_line(error: BaseException) -> str:
    """What a library's exception says first, and what it is called where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def runtime_says(error: BaseException) -> str:
    """What ONNX Runtime says is wrong: without its number, and without the place and signature in its own code, which
    are longer than that."""
    return _PLACE.sub(" ", _CODE.sub("", first_line(error)))[:300]


def not_utf8(error: UnicodeDecodeError) -> str:
    """Why the bytes of a file are no UTF-8. PowerShell and editors of Windows write UTF-16, which a mark begins."""
    if error.object[:2] in UTF16_MARKS:
        return "it is UTF-16; convert it, for example by iconv -f utf-16 -t utf-8"
    return f"byte 0x{error.object[error.start]:02x} at place {error.start} is no UTF-8; save it as UTF-8"


def no_json(error: BaseException) -> str:
    """What is wrong in one line of a file of JSON lines. The parser calls every line its first, which the caller knows
    better."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return not_utf8(error)
    return first_line(error)
