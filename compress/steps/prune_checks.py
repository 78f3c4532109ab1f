"""What the settings of the step `prune` may ask of a network, found out before anything is done."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from penjing.compress.prune.subject import shapes_of
from penjing.compress.steps.base import Context
from penjing.core.errors import ConfigError


def check_parts(parts: tuple[str, ...] | None, layers: int | tuple[int, ...] | None, context: Context) -> None:
    """Refuse `parts` that the family does not have, and more `layers` than the model of the recipe may lose; earlier
    steps leave it no more.

    Raises:
        ConfigError: it has none, or others; so many layers are not there.
    """
    known = context.family.need("pruner", "pruned").parts
    if known and (wrong := [part for part in parts or () if part not in known]):
        raise ConfigError(f"parts: {context.model} is {context.family.said}, which has no {wrong[0]!r}; leave it out")
    if parts is not None and not known:
        raise ConfigError(
            f"parts={list(parts)}: decoders have parts, {context.model} is {context.family.said}; leave them out"
        )
    count = layers if isinstance(layers, int) else len(layers or ())
    whole = context.family.need("pruner", "pruned").num_layers
    if count and whole is not None and count >= (has := whole(context.model)):
        raise ConfigError(f"layers={layers}: {context.model} has {has}, and at least one must stay")


def check_reconstruct(asked: bool, context: Context) -> None:
    """Refuse `reconstruct` of a family that has none.

    Raises:
        ConfigError: it has none.
    """
    if asked and context.family.need("pruner", "pruned").reconstruct is None:
        raise ConfigError(f"reconstruct is for decoders, {context.model} is {context.family.said}; leave it out")


def check_method(method: str, parts: tuple[str, ...], context: Context) -> None:
    """Refuse "obs" where there is none.

    Raises:
        ConfigError: the family has none, or one of `parts` is read by more than the layer that would be corrected.
    """
    if method != "obs":
        return
    if context.family.need("pruner", "pruned").obs is None:
        raise ConfigError(
            f'method="obs" is for decoders, {context.model} is {context.family.said}; take "taylor" or "activation"'
        )
    if "hidden" in parts:
        raise ConfigError(
            'method="obs" corrects down_proj and o_proj for what leaves, and the part "hidden" is read by all layers; '
            'take method="activation" for it'
        )


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
