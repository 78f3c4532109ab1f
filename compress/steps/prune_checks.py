"""What the settings of the step `prune` may ask of a network, found out before anything is done."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from penjing.compress.prune.subject import shapes_of
from penjing.compress.steps.base import Context
from penjing.core.errors import ConfigError


def check_parts(parts: tuple[str, ...] | None, context: Context) -> None:
    """Refuse `parts` of a family that has none.

    Raises:
        ConfigError: it has none.
    """
    if parts is not None and not context.family.need("pruner", "pruned").parts:
        raise ConfigError(
            f"parts={list(parts)}: decoders have parts, {context.model} is {context.family.said}; leave them out"
        )


def check_reconstruct(asked: bool, context: Context) -> None:
    """Refuse `reconstruct` of a family that has none.

    Raises:
        ConfigError: it has none.
    """
    if asked and context.family.need("pruner", "pruned").reconstruct is None:
        raise ConfigError(f"reconstruct is for decoders, {context.model} is {context.family.said}; leave it out")


def check_protected(protect: tuple[str, ...], folder: Path, model: nn.Module) -> None:
    """Refuse patterns that protect nothing.

    Raises:
        ConfigError: one matches no tensor of `model`.
    """
    for pattern in protect:
        if not any(fnmatchcase(name, pattern) for name in shapes_of(model)):
            raise ConfigError(
                f"protect: {pattern!r} matches no tensor of {folder}; look with 'penjing compress inspect'"
            )
