"""Recipes of training that come with penjing take their first step as they are written; for what they fetch there is a
stand-in. Those of alignment have a file of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penjing.core.recipes import known_recipes
from penjing.train.data.images import ImageSet
from penjing.train.families import classifier
from penjing.train.run import train
from penjing.train.sources import open as opened
from penjing.train.sources import scenes
from tests.core.images.test_sound import recording, tone
from tests.core.models.encoders import write_sentence_transformer
from tests.train.recipe.test_alignment_recipes import RECIPES

SHORT = ["steps=1", "evaluation.every=1", "evaluation.samples=4", "data.batch_size=4", "device=cpu"]
NARROW = ["model.num_hidden_layers=1", "model.hidden_size=64", "model.intermediate_size=64", "model.head_dim=16"]
SETTINGS = {
    "clip-emoji": [],
    "decoder-1b": [*NARROW, "model.num_attention_heads=4", "model.num_key_value_heads=2", "data.sequence_length=64"],
    "decoder-moe-tiny": [],
    "decoder-tiny": [],
    "hear-digits": [],
    "resnet-fashion": [],
    "resnet-images": ["data.images=photos", "data.height=16", "data.width=16"],
    "vlm-tiny": [],
}
LONG = ("decoder-1b", "decoder-moe-tiny", "decoder-tiny", "resnet-fashion")  # many tests train such networks


def drawn(split: str, progress: object) -> ImageSet:
    """In place of Fashion-MNIST."""
    labels = np.repeat(np.arange(10), 2)
    return ImageSet(np.broadcast_to(labels[:, None, None, None], (20, 1, 28, 28)).astype(np.uint8), labels, 10)


def painted(folder: Path) -> None:
    """Eight images of two classes, and the table of what each is called."""
    folder.mkdir(parents=True)
    rows = []
    for place in range(8):
        name = ("a list", "the object")[place % 2]
        path = folder / name / f"{place}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((20, 24, 3), 20 * place, np.uint8)).save(path)
        rows.append(json.dumps({"image": f"{name}/{place}.png", "text": f"{name} {place}"}))
    (folder / "pairs.jsonl").write_text("\n".join(rows))


def spoken(folder: Path) -> None:
    """Recordings and the tables of what is said in them."""
    (folder / "wav").mkdir(parents=True)
    rows = []
    for place in range(8):
        (folder / "wav" / f"{place}.wav").write_bytes(recording(tone(300.0 * (1 + place), 0.3)))
        rows.append(json.dumps({"prompt": "<image>Which digit?", "completion": " one", "images": [f"{place}.wav"]}))
    for name in ("learn", "test"):
        (folder / f"{name}.jsonl").write_text("\n".join(rows))


def test_no_recipe_of_training_is_without_a_first_step() -> None:
    assert {recipe.name for recipe in known_recipes() if recipe.stage == "train"} == SETTINGS.keys() | RECIPES.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in SETTINGS]
)
def test_a_recipe_takes_its_first_step(
    name: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/decoder-mini").symlink_to(tiny_checkpoint)
    write_sentence_transformer(tmp_path / "build/minilm", layers=1)
    spoken(tmp_path / "build/digits")
    painted(tmp_path / "photos")
    for module in (classifier, scenes):
        monkeypatch.setattr(module, "load_fashion", drawn)
    monkeypatch.setattr(scenes, "SCENES", {name: (kind, 8) for name, (kind, _) in scenes.SCENES.items()})
    monkeypatch.setattr(opened, "emoji_pairs", lambda vendor, progress: tmp_path / "photos/pairs.jsonl")
    assert "loss" in train(Path(name), [*SHORT, *SETTINGS[name]])
    assert (tmp_path / "build" / name / "config.json").exists()
