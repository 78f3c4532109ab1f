"""Two towers from recipe to checkpoint, on squares of a colour and the colours' names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from penjing.core.checkpoint.towers import load_towers
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import family_of
from penjing.core.imports.importer import import_model
from penjing.train.run import train
from tests.core.models.encoders import write_sentence_transformer
from tests.core.vision.paired import Kind, write_paired

RECIPE = """
output = "{folder}/out"
steps = 30
device = "cpu"
freeze = ["text.*"]
[model]
architecture = "towers"
image = {{ architecture = "resnet", depth = 8, width = 4 }}
text = "{folder}/text"
dimension = 8
[data]
kind = "pairs"
sources = ["{folder}/pairs.jsonl"]
held_out_sources = ["{folder}/pairs.jsonl"]
height = 8
width = 8
batch_size = 16
[objective]
kind = "clip"
[learning_rate]
peak = 0.02
[evaluation]
every = 30
[monitor]
tensorboard = false
"""
NAMES = {"the object": (255, 0, 0), "a list": (0, 255, 0), "is python": (0, 0, 255), "name of it": (255, 255, 0)}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_sentence_transformer(tmp_path / "text", layers=1)
    random, rows = np.random.default_rng(0), []
    for place in range(32):
        name = list(NAMES)[place % 4]
        noise = random.integers(-40, 40, (10, 9, 3))
        Image.fromarray((np.array(NAMES[name]) + noise).clip(0, 255).astype(np.uint8)).save(tmp_path / f"{place}.png")
        rows.append(json.dumps({"image": f"{place}.png", "text": name}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


@pytest.mark.parametrize(
    "settings", [[], ["objective.kind=siglip", "data.micro_batch=8"], ["freeze=[]", "precision.mode=bf16"]]
)
def test_towers_learn_which_text_belongs_to_an_image(recipe: Path, tmp_path: Path, settings: list[str]) -> None:
    results = train(recipe, settings)
    assert results["image_to_text_at_1"] > 0.7
    assert results["text_to_image_at_1"] > 0.7
    assert family_of(tmp_path / "out") == "towers"
    model = load_towers(tmp_path / "out")
    assert (model.logit_bias is not None) == ("objective.kind=siglip" in settings)
    with torch.no_grad():
        seen = model(torch.zeros(2, 3, 8, 8), torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5))
    torch.testing.assert_close(seen.images.norm(dim=1), torch.ones(2))


def test_training_goes_on_from_towers(recipe: Path, tmp_path: Path) -> None:
    first = train(recipe)
    lines = recipe.read_text().splitlines()
    begin, end = lines.index("[model]"), lines.index("[data]")
    recipe.write_text("\n".join([f'initial = "{tmp_path}/out"', *lines[:begin], *lines[end:]]))
    again = train(recipe, [f"output={tmp_path}/next", "learning_rate.peak=1e-7", "steps=1"])
    assert again["image_to_text_at_1"] == pytest.approx(first["image_to_text_at_1"], abs=0.1)
    with pytest.raises(ConfigError, match=r"has learnt by 'clip'; set objective.kind = 'clip'"):
        train(recipe, [f"output={tmp_path}/other", "objective.kind=siglip"])


def test_texts_are_held_out_with_all_their_images(recipe: Path) -> None:
    results = train(recipe, ["data.held_out_sources=[]", "data.held_out=0.3", "steps=1", "evaluation.every=1"])
    assert results["image_to_text_at_10"] == 1.0  # of so few different texts all are among ten


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (["objective.kind=cross_entropy"], ConfigError, "set objective.kind = 'clip' or 'siglip'"),
        (["objective.temperature=0"], ConfigError, "temperature"),
        (["parallel.zero=2"], ConfigError, "takes data parallelism alone"),
        (["compile=true"], ConfigError, "whose texts differ in length"),
        (["model.text=nowhere"], InputError, "nowhere"),
        (
            ["data.sources=['builtin:emoji-none']"],
            InputError,
            "there is no builtin:emoji-none; take builtin:emoji-apple",
        ),
        (["data.held_out_sources=[]", "data.held_out=0"], ConfigError, "leaves nothing to evaluate on"),
        (["model.image.depth=9"], ConfigError, "depth"),
    ],
)
def test_what_does_not_fit_is_one_line(recipe: Path, settings: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        train(recipe, settings)
    assert str(caught.value).count("\n") <= 1


def test_an_objective_of_pairs_needs_pairs(recipe: Path) -> None:
    text = recipe.read_text().replace('kind = "pairs"', 'kind = "text"')
    text = (
        text.replace("height = 8", "sequence_length = 8").replace("width = 8\n", "", 1).replace("held_out_sources", "#")
    )
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=r"compares pairs of images and texts; give data.kind = 'pairs'"):
        train(recipe)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("freeze", ['["text.*"]', '["image.*"]'])
def test_training_goes_on_from_what_was_imported(recipe: Path, tmp_path: Path, kind: Kind, freeze: str) -> None:
    from transformers import AutoModel

    write_paired(tmp_path / "theirs", kind)
    import_model(str(tmp_path / "theirs"), tmp_path / "in")
    lines = recipe.read_text().splitlines()
    begin, end = lines.index("[model]"), lines.index("[data]")
    recipe.write_text("\n".join([f'initial = "{tmp_path}/in"', *lines[:begin], *lines[end:]]))
    settings = [f"objective.kind={kind}", f"freeze={freeze}", "steps=3", "data.micro_batch=8", "evaluation.every=3"]
    results = train(recipe, [*settings, "learning_rate.peak=1e-3"])
    assert 0 <= results["image_to_text_at_1"] <= 1
    before, after = (AutoModel.from_pretrained(tmp_path / name).state_dict() for name in ("in", "out"))
    parts = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    frozen, learnt = ("text_model", "vision_model") if "text" in freeze else ("vision_model", "text_model")
    assert learnt in parts
    assert (frozen in parts) == (kind == "siglip" and frozen == "text_model")  # its head is our text_projection
