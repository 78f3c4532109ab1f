"""Where penjing keeps what it downloads and unpacks."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder (not created here): $PENJING_CACHE, else $XDG_CACHE_HOME/penjing, else ~/.cache/penjing."""
    if chosen := os.environ.get("PENJING_CACHE"):
        return Path(chosen).expanduser().absolute()
    # the XDG specification: a relative path is invalid and ignored
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "penjing"
