"""`penjing.run` and the other calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penjing
from penjing.calls import _toml


def test_run_trains_a_training_recipe(recipe: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert penjing.run(recipe, {"checkpoint.every": 1}, out=other, steps=2) == other
    assert (other / "penjing.json").exists()
    assert not (tmp_path / "out").exists()
    with pytest.raises(penjing.InputError, match="already exists"):
        penjing.run(recipe, out=other, steps=2)
    assert penjing.run(recipe, out=other, force=True, steps=1, data=_data(recipe)) == other


def _data(recipe: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(recipe.read_text())["data"]


def test_run_refuses_what_is_no_recipe(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("output = 'x'\n")
    with pytest.raises(penjing.ConfigError, match=r"empty.toml names no model: a training recipe describes one"):
        penjing.run(empty)
    with pytest.raises(penjing.ConfigError, match=r"did you mean 'decoder-tiny'"):
        penjing.run("decodr-tiny")
    with pytest.raises(penjing.ConfigError, match=r"resume='auto' is for training"):
        penjing.run("smollm2-int8", resume="auto")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.2, "0.2"),
        (True, "true"),
        ('a "b" \U0001f333', '"a \\"b\\" \U0001f333"'),
        (Path("build/x"), '"build/x"'),
        ((1, 2), "[1, 2]"),
        ({"kind": "cosine", "peak": 1e-5}, '{kind = "cosine", peak = 1e-05}'),
    ],
)
def test_values_become_toml(value: Any, text: str) -> None:
    assert _toml("key", value) == text


@pytest.mark.parametrize("value", [None, [None], {1, 2}, object()])
def test_values_that_toml_has_not(value: Any) -> None:
    with pytest.raises(penjing.ConfigError, match=r"data.shards=.* cannot be written in TOML"):
        _toml("data.shards", value)


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(penjing.InputError):
        penjing.report([])
    with pytest.raises(penjing.InputError):
        penjing.report(tmp_path)


def test_import_takes_paths(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = penjing.import_model(tiny_checkpoint, tmp_path / "imported")
    assert isinstance(penjing.load(out), penjing.LoadedModel)
