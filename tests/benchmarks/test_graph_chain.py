"""The whole chain on an imported network: which runs the benchmark makes, and that they fit the recipes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from lib.photos import cut_training
from PIL import Image
from run_graph_chain import NAMES, commands

from penjing.compress.recipe import load_recipe
from penjing.core.errors import InputError


def test_each_run_is_a_recipe_with_the_asked_updates(tmp_path: Path) -> None:
    outputs = {name: tmp_path / name for name in NAMES}
    asked = argparse.Namespace(model=tmp_path / "net", ratio=0.2, updates=7, updates_in_int8=3, rate=3e-4)
    found = commands(asked, tmp_path / "squares", outputs)
    assert list(found) == list(NAMES)
    for name, (_, verb, recipe, *said) in found.items():
        assert verb == "compress"
        assert set(said[::2]) == {"--set"}
        read = load_recipe(Path(recipe), said[1::2], "graph")
        assert read.output == outputs[name]
        assert str(read.data.source) == str(tmp_path / "squares")
        if name == "chain":
            updates = [step.model_dump().get("steps") for step in read.steps]
            assert updates == [None, 7, 3]


def test_training_sees_none_of_the_held_out_photographs(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    for place in (
        "usr/share/backgrounds/mate/nature/a.jpg",
        "usr/share/backgrounds/mate/abstract/b.jpg",
        "usr/share/backgrounds/c.png",
        "sklearn/datasets/images/d.jpg",
        "skimage/data/coffee.png",
    ):
        (sources / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (210, 220), (0, 0, 255) if "nature" in place or "sklearn" in place else (255, 0, 0)).save(
            sources / place
        )
    out = cut_training(sources, tmp_path / "squares", 2)
    colours = [Image.open(path).convert("RGB").getpixel((5, 5)) for path in sorted(out.iterdir())]
    assert len(colours) == 6
    assert all(isinstance(colour, tuple) and colour[0] > 200 for colour in colours)
    with pytest.raises(InputError, match="lacks photographs"):
        cut_training(tmp_path / "squares", tmp_path / "more", 2)
