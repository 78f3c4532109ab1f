"""Where a model in Triton server learns what to load, and how."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penjing.core.errors import ConfigError, InputError
from penjing.serve.client.protocol import ENGINE_VARIABLE, MODEL_VARIABLE


def read_settings(args: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """The model's folder and its settings, not validated yet, from what Triton server gives a model's `initialize`.

    They are the parameters `model` and `engine` of the model's configuration, else the environment variables
    PENJING_MODEL and PENJING_ENGINE. A relative folder lies in the model's own folder in the repository.

    Raises:
        InputError: no folder is named.
        ConfigError: the settings are no JSON object.
    """
    folder = parameter(args, "model") or os.environ.get(MODEL_VARIABLE)
    if not folder:
        raise InputError(f"no model is named: set {MODEL_VARIABLE}, or the parameter model in config.pbtxt")
    text = parameter(args, "engine") or os.environ.get(ENGINE_VARIABLE) or "{}"
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{ENGINE_VARIABLE} is not valid JSON: {error}") from None
    found = reachable(Path(args.get("model_repository", "")) / folder)
    if not isinstance(values, dict):
        raise ConfigError(f"{ENGINE_VARIABLE} must be a JSON object, got {text!r:.80}")
    return found, values


def parameter(args: Mapping[str, str], name: str) -> str | None:
    """A parameter of the model's configuration; None where it is not set."""
    entry = json.loads(args["model_config"]).get("parameters", {}).get(name)
    return None if entry is None else entry["string_value"] or None


def reachable(folder: Path) -> Path:
    """A folder by a name that every library takes.

    The Python inside Triton server takes file names for ASCII. Those with other letters reach it as escapes that C++
    and Rust libraries refuse, and that end the process when they are part of an error's message.
    """
    text = str(folder)
    if text.isascii() or sys.getfilesystemencoding() == "utf-8":
        return folder
    try:
        descriptor = os.open(text.encode("utf-8", "surrogateescape"), os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise InputError(f"the model's folder {text!a} cannot be opened: {error.strerror}") from None
    return Path(f"/proc/self/fd/{descriptor}")
