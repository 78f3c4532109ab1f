"""Every setting of the serving stage says what it means."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from pydantic import BaseModel

import penjing.serve
from penjing.core.config import Config
from penjing.serve.sampling.params import SamplingParams

ROOT = Path(penjing.serve.__path__[0])


def settings() -> list[type[BaseModel]]:
    """Every class of settings that a module of the stage defines; modules without one are not imported."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if "Config" in path.read_text(encoding="utf-8"):
            name = ".".join(("penjing.serve", *path.relative_to(ROOT).with_suffix("").parts))
            members = vars(importlib.import_module(name)).values()
            found += [kind for kind in members if isinstance(kind, type) and issubclass(kind, Config)]
    return sorted(
        {kind for kind in found if kind.__module__.startswith("penjing.serve.")}, key=lambda kind: kind.__name__
    )


def test_they_are_found() -> None:
    front = ["FrontConfig", "FrontJob", "FrontLimits", "FrontModel", "Key", "KeyFile"]
    served = ["BatchConfig", "EngineConfig", "GraphSettings", "ServeConfig", "TowersSettings"]
    fleet = ["Cache", "FleetModel", "FleetPlan"]
    adapters = ["AdapterEntry", "ServedAdapters", "WantedAdapters"]
    changes = ["Change", "Answered", *adapters, "WeightPiece"]  # of a running server
    assert [kind.__name__ for kind in settings()] == sorted([*served, *front, *fleet, *changes])


@pytest.mark.parametrize("kind", settings(), ids=lambda kind: kind.__name__)
def test_each_is_described_in_whole_sentences(kind: type[BaseModel]) -> None:
    for name, field in kind.model_fields.items():
        text = field.description or ""
        assert text.endswith("."), f"{kind.__name__}.{name}: {text!r}"
        assert text[0].isupper() or text.startswith(name), f"{kind.__name__}.{name}: {text!r}"


def test_each_sampling_parameter_has_the_rule_that_its_error_quotes() -> None:
    assert all(field.description for field in SamplingParams.model_fields.values())
