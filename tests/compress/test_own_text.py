"""A run with the user's own texts: calibrated on and judged on, and made again when a text changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.compress.report.schema import read_report
from penjing.compress.run import run_recipe
from penjing.core.errors import ConfigError
from penjing.core.manifest import read_manifest
from tests.compress.conftest import write_recipe


def test_own_texts_calibrate_and_are_judged_on(tiny_checkpoint: Path, tmp_path: Path) -> None:
    mine, held = tmp_path / "mine", tmp_path / "held.txt"
    mine.mkdir()
    (mine / "a.txt").write_text("zebras and yaks " * 400)
    held.write_text("yaks and zebras " * 400)
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    text = recipe.read_text().replace("[data]\n", f'[data]\ncalibrate = ["{mine}"]\n')
    recipe.write_text(text.replace("[evaluate]\n", f'[evaluate]\nown_tokens = 128\nown = {{ held = "{held}" }}\n'))

    made = run_recipe(recipe)
    parts = read_report(made).last.quality.parts
    assert [(part.name, part.samples) for part in parts] == [("prose", 2), ("code", 1), ("held", 2)]
    first = read_manifest(made)
    assert read_manifest(run_recipe(recipe)) == first  # nothing changed: what is there is kept

    (mine / "a.txt").write_text("quite another text " * 400)
    again = read_manifest(run_recipe(recipe, force=True))
    assert again.sha256["model.safetensors"] != first.sha256["model.safetensors"]
    assert str(mine) in (made / "recipe.toml").read_text()

    held.write_text((mine / "a.txt").read_text())
    with pytest.raises(ConfigError, match=r"evaluate.own: .*held.txt is calibrated on .*a.txt"):
        run_recipe(recipe, force=True)
