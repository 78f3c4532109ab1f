"""The process that calls a reward function of the user: it reads JSON lines {"prompt", "answer", "row"} and answers
each with one, {"reward"} or {"error"}. What the function prints goes to standard error.

    python -m penjing.train.align.worker FILE.py:FUNCTION
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

from penjing.core.cluster.answers import output_for_answers
from penjing.core.errors import InputError
from penjing.core.imports.user_code import named_errors, user_function


def serve_rewards(spec: str, questions: TextIO, answers: TextIO) -> None:
    """Answer until `questions` end or the function fails; the first line says that its file was read."""

    def say(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        function = user_function(spec)
        _check_parameters(spec, function)
        say({})
        for line in questions:
            with named_errors(spec):
                given = function(**json.loads(line))
            say({"reward": _number(given)})
    except InputError as error:
        say({"error": str(error)})


def _number(given: Any) -> float | None:
    """What was returned as a number; None: it is none. numpy and torch have numbers of their own, and arrays."""
    if not isinstance(given, int | float) and not hasattr(given, "item"):
        return None
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several numbers, a text, an integer too large
        return None


def _check_parameters(spec: str, function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called as it will be, before anything is sampled.

    Raises:
        InputError: its parameters have other names.
    """
    try:
        parameters = inspect.signature(function)
    except ValueError:  # of C code, which does not tell
        return
    try:
        parameters.bind(prompt="", answer="", row={})
    except TypeError as error:
        raise InputError(
            f"{spec} is called as function(prompt, answer, row): {error}; name its parameters so"
        ) from error


if __name__ == "__main__":
    serve_rewards(sys.argv[1], sys.stdin, output_for_answers())
