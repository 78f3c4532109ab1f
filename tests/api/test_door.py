"""`import penjing`: light, lazy, complete."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import penjing
from penjing.core import errors

STAGES = ("train", "compress", "serve", "core", "kernels", "recipes", "model_repository")
IMPORT = """
import sys, time
began = time.perf_counter()
import penjing
print(time.perf_counter() - began, *{"torch", "pydantic", "numpy", "typer", "onnx"} & set(sys.modules))
"""


def test_import_is_light() -> None:
    results = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60)
        for _ in range(3)
    ]
    seconds, *heavy = min(result.stdout.split() for result in results)
    assert heavy == []
    assert float(seconds) < 0.05


def test_every_name_is_there() -> None:
    for name in penjing.__all__:
        assert getattr(penjing, name) is getattr(penjing, name)
        assert name in dir(penjing)
    assert penjing.__version__ == version("penjing")
    assert not set(penjing.__all__) & set(STAGES)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'quantise'; it has .*, load, "):
        _ = penjing.quantise  # pyright: ignore[reportAttributeAccessIssue]


def test_every_kind_of_error_is_there() -> None:
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert kinds <= set(penjing.__all__)
    assert penjing.InputError is errors.InputError


def test_stages_are_packages_of_their_own() -> None:
    import penjing.core.errors
    import penjing.train.recipe.recipe

    assert penjing.__file__ is not None
    assert (Path(penjing.__file__).parent / "py.typed").exists()
