"""What a task in another process has to say: its result, or the error that a user is to see."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

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


def output_for_answers() -> TextIO:
    """Standard output for answers alone. What a library prints is none, and goes to standard error from now on: also
    from C, which knows the descriptor and not `sys.stdout`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    return answers
