"""A pytest plugin (`-p tests.core.models.without_distributed`): penjing and its tests cannot import torch.distributed.

torch itself and transformers, the oracle, use it without being asked.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

_import = builtins.__import__


def _without_distributed(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    importer = str((globals or {}).get("__name__"))
    wanted = [name, *(f"{name}.{part}" for part in fromlist or ())]
    if importer.startswith(("penjing.", "tests.")) and any(
        f"{one}.".startswith("torch.distributed.") for one in wanted
    ):
        raise ImportError(f"torch.distributed is blocked, and {importer} imports it")
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = _without_distributed
