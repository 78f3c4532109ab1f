"""What a task in another process has to say: its result, or the error that a user is to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penjing.core.errors import ConfigError, InputError, PenjingError, SetupError

_KINDS: dict[int, type[PenjingError]] = {2: ConfigError, 3: InputError, 6: SetupError}
_UNEXPECTED = 70  # of sysexits.h: an error that is nobody's wrong setting


def failure(code: int, said: str) -> PenjingError:
    """The error that another process has had, by its exit code."""
    return _KINDS.get(code, PenjingError)(said)


def answer_of(work: Callable[[], Any]) -> dict[str, Any]:
    """What `work` returns as `result`, or its `error` and exit `code`: what can be told between processes."""
    try:
        return {"result": work()}
    except PenjingError as error:
        return {"error": str(error), "code": error.exit_code}
    except Exception as error:  # the edge of the process: the one that asked tells the user
        return {"error": f"unexpected {type(error).__name__}: {error}", "code": _UNEXPECTED}
