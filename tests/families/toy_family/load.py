"""What `penjing.load` does with a toy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toy_family.artifact import open_artifact
from toy_family.network import load

from penjing.core.artifact.base import is_artifact
from penjing.core.errors import ConfigError
from penjing.networks import Opener


def _open(folder: Path, device: str) -> Any:
    if is_artifact(folder):
        if device != "cpu":
            raise ConfigError(f"device {device!r}: a toy in INT8 runs on the CPU")
        return open_artifact(folder)
    return load(folder).to(device)


FAMILY = Opener(open=_open)
