"""Which class does a step of which kind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penjing.compress.steps.base import Step
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.prune_weights import PruneWeights
from penjing.compress.steps.quantize import quantize_for
from penjing.compress.steps.sparsify import Sparsify
from penjing.compress.steps.train import Distill, Finetune
from penjing.compress.steps.window import Window
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.core.family import FamilyName, names_of

STEPS: dict[str, Callable[[FamilyName], type[Step]]] = {
    "prune": lambda _: Prune,
    "prune_weights": lambda _: PruneWeights,
    "sparsify": lambda _: Sparsify,
    "window": lambda _: Window,
    "distill": lambda _: Distill,
    "finetune": lambda _: Finetune,
    "quantize": quantize_for,
}
"""Kind → the class for a network of a family. A new step is one file, and one line here."""


def step_forms() -> dict[str, type[Step]]:
    """Every form of an entry of `[[steps]]`: its class by kind, and by kind and family, as in "quantize.decoder", where
    families are told different things."""
    found: dict[str, type[Step]] = {}
    for kind, of in STEPS.items():
        forms: dict[FamilyName, type[Step]] = {}
        for name in names_of("compress"):
            with suppress(ConfigError):  # the family cannot do it
                forms[name] = of(name)
        alike = len(set(forms.values())) == 1
        found |= {kind if alike else f"{kind}.{name}": form for name, form in forms.items()}
    return found


def parse_step(values: Any, place: int, name: FamilyName, source: str) -> Step:
    """The step that an entry of `[[steps]]` describes.

    Raises:
        ConfigError: an unknown kind, key or value, which the message names as the recipe spells it.
    """
    where = f"steps.{place}."
    if not isinstance(values, dict) or not isinstance(kind := values.get("kind"), str) or kind not in STEPS:
        found = values.get("kind") if isinstance(values, dict) else values
        raise ConfigError(f"{source}: {where}kind = {found!r} is no kind of step; use {', '.join(STEPS)}")
    try:
        settings = STEPS[kind](name)
    except ConfigError as error:
        raise ConfigError(f"{source}: steps.{place}: {error}") from None
    return parse_config(settings, values, source, prefix=where)
