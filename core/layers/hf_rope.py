"""The rotary settings of a Hugging Face `config.json`, in either spelling ⇄ `RopeScaling`."""

from __future__ import annotations

import math
from typing import Any

from penjing.core.errors import InputError
from penjing.core.layers.settings import MAX_SIZE, RopeScaling

_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings", "attention_factor"),
}
_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")


def rope_from_hf(values: dict[str, Any], source: str) -> tuple[Any, dict[str, Any]]:
    """The base of the rotary frequencies and the fields of `RopeScaling` of a parsed `config.json`, not yet checked.

    Raises:
        InputError: an unknown scaling, one that lacks a field, or heads of which a part rotates.
    """
    rope = _section(values, source)
    rope_type = rope.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise InputError(f"{source}: rotary scaling {rope_type!r} is not supported; supported: {known}")
    if rope_type == "longrope":
        rope |= _longrope(rope, values, source)
    given = {name for name in rope if rope[name] is not None}
    used = [name for name in _FIELDS[rope_type] if name in given or name not in _OPTIONAL]
    if missing := [name for name in used if name not in given]:
        raise InputError(f"{source}: rotary scaling {rope_type!r} lacks {', '.join(missing)}")
    return rope.get("rope_theta", 10000.0), {"rope_type": rope_type, **{name: rope[name] for name in used}}


def rope_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """`rope_parameters` without the base, which `rope_from_hf` reads."""
    used = _FIELDS[scaling.rope_type]
    optional = [name for name in _OPTIONAL if not name.startswith("beta_")]  # those have one default everywhere
    left_out = {name for name in optional if getattr(scaling, name) == getattr(RopeScaling(), name)}
    values = {"rope_type": scaling.rope_type, **{name: getattr(scaling, name) for name in used if name not in left_out}}
    if scaling.rope_type == "longrope":
        # left out, it would follow from the context, which may be any part of the published one here
        values["attention_factor"] = 1.0 if scaling.attention_factor is None else scaling.attention_factor
        values["long_factor"] = scaling.long_factor or scaling.short_factor
    return values


def _section(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Rotary settings under the names of transformers 5, from either spelling."""
    rope = {"rope_theta": values["rope_theta"]} if "rope_theta" in values else {}
    for key in ("rope_scaling", "rope_parameters"):
        section = values.get(key) or {}
        if not isinstance(section, dict):
            raise InputError(f"{source}: {key} must be an object (got {section!r})")
        rope |= section
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    if (share := rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))) != 1.0:
        raise InputError(f"{source}: partial_rotary_factor {share} is not supported; supported: 1.0")
    return rope


def _longrope(rope: dict[str, Any], values: dict[str, Any], source: str) -> dict[str, Any]:
    """The original context, which may stand outside the settings, and the factor of rotated queries and keys, which
    follows from how far the published context goes beyond it; as in transformers."""
    whole = values.get("max_position_embeddings")
    original = values.get("original_max_position_embeddings", rope.get("original_max_position_embeddings", whole))
    if isinstance(original, bool) or not isinstance(original, int) or original < 2:
        raise InputError(f"{source}: longrope needs original_max_position_embeddings, a context (got {original!r})")
    attention, growth = rope.get("attention_factor"), rope.get("factor")
    if growth is None:
        growth = min(whole, MAX_SIZE) / original if isinstance(whole, int) else 1.0  # beyond it the context is refused
    if isinstance(growth, bool) or not isinstance(growth, int | float) or not 0 < growth < math.inf:
        raise InputError(f"{source}: factor of longrope must be a positive number (got {growth!r})")
    if attention is None:
        attention = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    return {"original_max_position_embeddings": original, "attention_factor": attention}
