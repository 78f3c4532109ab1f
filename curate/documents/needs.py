"""Packages of the extra `curate`, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from penjing.core.errors import SetupError


def needed(module: str) -> Any:
    """The module of a package that `penjing[curate]` installs.

    Raises:
        SetupError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise SetupError(
            f"penjing curate needs {error.name}, which is not installed: pip install 'penjing[curate]'"
        ) from None
