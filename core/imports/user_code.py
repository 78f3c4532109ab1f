"""Code that the user names as "file.py:function": the one code, besides its own, that penjing runs."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError

_LONGEST = 500  # signs of what the user's code says when it fails


def user_function(spec: str) -> Any:
    """The function that `spec` ("file.py:function") names; the file's code runs, and may import what lies beside it.

    Raises:
        InputError: there is no such file or function, or the file raises.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise InputError(f"{path} is no file; write FILE.py:FUNCTION")
    found = importlib.util.spec_from_file_location(f"penjing_user_{path.stem}", path)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    if (beside := str(path.absolute().parent)) not in sys.path:
        # Behind all else: a neighbour's name must not hide a package that penjing imports later.
        sys.path.append(beside)
    with named_errors(spec):
        # Not by its loader, which takes kept bytecode for a file of the same size that changed within a second.
        exec(compile(path.read_bytes(), path.absolute(), "exec"), vars(module))
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise InputError(f"{path} has no function {name!r}; it has {known or 'none'}")
    return function


@contextmanager
def named_errors(spec: str) -> Iterator[None]:
    """What the user's code raises, or its attempt to end the program, as an error that names its line.

    Raises:
        InputError: anything but an interrupt was raised.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # code of the user's raises what it likes
        path = Path(spec.rpartition(":")[0]).expanduser().absolute()
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        where = f", line {lines[-1]}" if lines else ""
        said = " ".join(str(error).split())[:_LONGEST]
        raise InputError(
            f"{spec} raised {type(error).__name__}{where}{said and ': '}{said}; mend the function"
        ) from error
