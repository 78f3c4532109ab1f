"""How a step is announced."""

from __future__ import annotations

from penjing.compress.decoder.settings import Transform
from penjing.compress.results import changed_settings
from penjing.compress.steps.base import Step
from penjing.compress.steps.prune import Prune


class Table(Step):
    transform: Transform = Transform()
    names: tuple[str, ...] = ()


def test_settings_are_named_as_a_recipe_names_them() -> None:
    step = Table(kind="quantize", transform=Transform(rotate=False, search_steps=5), names=("*.down_proj",))
    assert changed_settings(step) == 'transform.rotate false, transform.search_steps 5, names ["*.down_proj"]'
    assert changed_settings(Prune(kind="prune", ratio=0.5, method="l2")) == "method l2, ratio 0.5"
    assert changed_settings(Table(kind="quantize")) == "default settings"
