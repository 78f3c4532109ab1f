"""A decoder learns to see, from recipe to a checkpoint that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from penjing.core.checkpoint.vision_language import load_vision_language
from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.family import family_of
from penjing.core.images.sound import Sound
from penjing.core.imports.importer import import_model
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import Silent
from penjing.core.vision.vision_language import VisionLanguage, VisionLanguageConfig
from penjing.core.vision.vit import ViTConfig
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.data.images import ImageSet
from penjing.train.families import vision_language
from penjing.train.families.base import build_task
from penjing.train.plan.preflight import check_recipe
from penjing.train.processes.world import World
from penjing.train.recipe.load import load_train_recipe
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.run import train
from penjing.train.sources import scenes as scenes_module
from penjing.train.sources.scenes import scenes
from tests.core.images.test_sound import recording, tone
from tests.serve.tiny import run_all

RECIPE = """
output = "{folder}/out"
steps = 40
seed = 1
device = "cpu"
[model]
architecture = "vision-language"
decoder = "{decoder}"
[model.vision]
image_size = 8
patch_size = 4
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
[data]
kind = "image-chat"
sources = ["{folder}/rows.jsonl"]
held_out_sources = ["{folder}/rows.jsonl"]
images = "{folder}"
sequence_length = 40
batch_size = 8
[learning_rate]
peak = 0.01
[evaluation]
every = 40
[monitor]
tensorboard = false
"""
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0)}


@pytest.fixture
def recipe(tmp_path: Path, tiny_checkpoint: Path) -> Path:
    random, rows = np.random.default_rng(0), []
    for place in range(16):
        name = list(COLOURS)[place % 2]
        noise = random.integers(-40, 40, (8, 8, 3))
        Image.fromarray((np.array(COLOURS[name]) + noise).clip(0, 255).astype(np.uint8)).save(tmp_path / f"{place}.png")
        rows.append(json.dumps({"prompt": "<image>What is it?", "completion": name, "images": [f"{place}.png"]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path, decoder=tiny_checkpoint))
    return path


def test_a_decoder_learns_to_see(recipe: Path, tmp_path: Path) -> None:
    assert train(recipe)["exact"] > 0.9
    assert family_of(tmp_path / "out") == "vision_language"
    blind = train(recipe, [f"output={tmp_path}/blind", "data.blind=true"])
    assert blind["exact"] <= 0.5


def test_a_picture_is_asked_about_next(recipe: Path, tmp_path: Path) -> None:
    task = build_task(load_train_recipe(recipe, []), Silent())
    asked = f'penjing generate {tmp_path} "What is here?" --image photo.png'
    assert task.next_command(tmp_path) == asked
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert task.next_command(tmp_path) == f"penjing serve {tmp_path}, then penjing chat --image photo.png"


def test_an_evaluation_takes_rows_from_everywhere(recipe: Path) -> None:
    every, some = (
        [row.tolist() for batch in task.held_out(1, World()) for row in batch["images"]]
        for task in (
            build_task(load_train_recipe(recipe, [f"evaluation.samples={most}"]), Silent()) for most in (16, 3)
        )
    )
    assert some == [every[0], every[5], every[10]]


def test_what_was_trained_is_read_imported_and_trained_further(recipe: Path, tmp_path: Path) -> None:
    from transformers import Idefics3ForConditionalGeneration

    first = train(recipe, ["steps=20", "evaluation.every=20"])
    ours = load_vision_language(tmp_path / "out")
    theirs = Idefics3ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    tokens = torch.tensor([[5, ours.config.image_token_id, 6, 7]])
    images = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images[None]).logits
        torch.testing.assert_close(ours(tokens, images), wanted, atol=1e-4, rtol=1e-4)
    import_model(str(tmp_path / "out"), tmp_path / "imported")
    again = load_vision_language(tmp_path / "imported")
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), again.parameters(), strict=True))
    text = recipe.read_text()
    begin, end = text.index("[model]"), text.index("[data]")
    recipe.write_text(f'initial = "{tmp_path}/imported"\n' + text[:begin] + text[end:])
    further = train(
        recipe,
        ["steps=1", "evaluation.every=1", "learning_rate.peak=1e-9", f"output={tmp_path}/next", 'freeze=["vision.*"]'],
    )
    assert further["loss"] == pytest.approx(first["loss"], abs=0.05)


def test_a_llava_is_begun_and_its_projector_trained_first(recipe: Path, tmp_path: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    shape = [
        "model.scale_factor=1", "model.projector.kind=mlp", "model.projector.bias=true", "model.vision.last_norm=false",
        "model.vision.class_token=true", "model.vision.activation=quick_gelu",
    ]  # fmt: skip
    frozen = 'freeze=["vision.*", "decoder.*"]'
    before = train(recipe, [*shape, "steps=1", "evaluation.every=1", frozen])
    first = load_vision_language(tmp_path / "out")
    after = train(recipe, [*shape, "steps=20", "evaluation.every=20", frozen, f"output={tmp_path}/more"])
    assert after["loss"] < before["loss"]
    more = load_vision_language(tmp_path / "more")
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, more.get_parameter(name)) is not name.startswith("projector."), name
    theirs = LlavaForConditionalGeneration.from_pretrained(tmp_path / "more").eval()
    token = more.config.image_token_id
    tokens, images = torch.tensor([[5, token, token, token, token, 6]]), torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images).logits
        torch.testing.assert_close(more(tokens, images), wanted, atol=1e-4, rtol=1e-4)


def test_the_rows_of_an_image_stand_in_each_of_its_questions() -> None:
    """An image that is computed once for two texts gives what it gives when it comes with each."""
    torch.manual_seed(0)
    vision = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    decoder = DecoderConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    model = VisionLanguage(VisionLanguageConfig(vision=vision, decoder=decoder, scale_factor=2, image_token_id=15))
    tokens, images = torch.tensor([[15, 1, 2], [15, 3, 4], [15, 5, 6]]), torch.randn(2, 3, 8, 8)
    places = torch.tensor([1, 0, 1])
    torch.testing.assert_close(model(tokens, images, seen=places), model(tokens, images[places]))


@pytest.mark.parametrize("settings", [["data.micro_batch=4"], ["data.micro_batch=2"]])
def test_micro_batches_change_nothing(recipe: Path, tmp_path: Path, settings: list[str]) -> None:
    few = ["steps=2", "evaluation.every=2", "optimizer.name=sgd"]  # AdamW makes rounding large
    whole = train(recipe, few)
    assert train(recipe, [*few, *settings, f"output={tmp_path}/cut"])["loss"] == pytest.approx(whole["loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (["model.scale_factor=3"], ConfigError, "2 patches of a side cannot be joined 3 at a time"),
        (["data.sequence_length=1000000"], ConfigError, "is more than the .* tokens that it sees"),
        (["model.decoder=nowhere"], InputError, "nowhere"),
        (["model.vision.patch_size=3"], ConfigError, "image_size=8 is not divisible by patch_size=3"),
        (["data.sources=['builtin:scenes']"], ConfigError, "set model.vision.image_size = 56"),
        (["compile=true"], ConfigError, "whose texts differ in length"),
        (["objective.label_smoothing=0.1"], ConfigError, "whose answers are learnt"),
        (["data.held_out_sources=[]", "data.held_out=0"], ConfigError, "leaves nothing to evaluate on"),
    ],
)
def test_what_does_not_fit_is_one_line(recipe: Path, settings: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        train(recipe, settings)


@pytest.mark.parametrize("setting", ["pp=2", "cp=2", "ep=2", "sequence=true"])
def test_parts_of_the_network_stay_together(recipe: Path, setting: str) -> None:
    """Whoever runs it: one process alone is told that it is too few first."""
    given = load_recipe(TrainRecipe, recipe, [f"parallel.{setting}"])
    with pytest.raises(ConfigError, match=r"takes data parallelism, ZeRO and parallel\.tp"):
        vision_language._check_run(given, cast(Any, None), cast(Any, None))


def test_heads_of_the_decoder_divide_among_processes_and_tokens_need_not(recipe: Path) -> None:
    check_recipe(load_recipe(TrainRecipe, recipe, ["parallel.tp=2"]), 2)  # 321 tokens with that of images
    with pytest.raises(ConfigError, match=r"parallel\.tp=3 does not divide model\.num_attention_heads=4"):
        check_recipe(load_recipe(TrainRecipe, recipe, ["parallel.tp=3"]), 3)


def test_scenes_say_what_lies_where(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.repeat(np.arange(10), 2)
    images = np.broadcast_to(labels[:, None, None, None], (20, 1, 28, 28)).astype(np.uint8)
    monkeypatch.setattr(scenes_module, "load_fashion", lambda split, progress: ImageSet(images, labels, 10))
    monkeypatch.setattr(
        scenes_module, "SCENES", {"learn": ("train", 3), "judge": ("test", 3), "tell": ("described", 3)}
    )
    names = [name.lower() for name in scenes_module.CLASSES]
    for name, turns in (("learn", 8), ("judge", 1)):
        for scene in scenes(name, None):  # type: ignore[arg-type]
            picture = scene.picture()
            assert picture.shape == (56, 56, 1)
            grid = {names[picture[28 * y, 28 * x, 0]]: (x, y) for x in (0, 1) for y in (0, 1)}
            assert len(grid) == 4
            assert len(scene.turns) == turns
            for question, answer in scene.turns:
                side, _, of = question.removeprefix("What is ").removesuffix("?").partition(" the ")
                step = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}[side]
                x, y = grid[of]
                assert grid[answer.removeprefix(" the ")] == (x + step[0], y + step[1])
    for scene in scenes("tell", None):  # type: ignore[arg-type]
        picture = scene.picture()
        there = ", ".join(f"the {names[picture[28 * y, 28 * x, 0]]}" for y in (0, 1) for x in (0, 1))
        assert scene.turns == (("What is here?", f" {there}"),)


def test_what_sees_spectrograms_hears(recipe: Path, tmp_path: Path) -> None:
    """Tones instead of colours: the same recipe with recordings in place of images, and the engine."""
    random, rows = np.random.default_rng(0), []
    tones = {"high": 2000.0, "low": 300.0}
    for place in range(16):
        name = list(tones)[place % 2]
        sound = tone(tones[name] * random.uniform(0.9, 1.1), 0.12) + random.normal(0, 0.01, 1920)
        (tmp_path / f"{place}.wav").write_bytes(recording(sound))
        rows.append(json.dumps({"prompt": "<image>Which?", "completion": name, "images": [f"{place}.wav"]}))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    hears = ["model.sound.hop=250", "model.vision.num_channels=1"]
    assert train(recipe, hears)["exact"] > 0.9
    model = load_vision_language(tmp_path / "out")
    assert model.config.look.sound == Sound(hop=250)
    engine = load_engine(tmp_path / "out", EngineConfig(num_blocks=64, max_num_sequences=2))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    for place, name in enumerate(tones):
        asked = Request("0", "<image>Which?", params, images=[(tmp_path / f"{place}.wav").read_bytes()])
        (outputs,) = run_all(engine, [asked]).values()
        assert "".join(each.text for each in outputs).startswith(name)
    with pytest.raises(RequestError, match=r"image 0 cannot be read: it is no WAV file"):
        run_all(engine, [Request("1", "<image>Which?", params, images=[b"\x89PNG"])])
    with pytest.raises(ConfigError, match=r"set vision\.num_channels = 1"):
        train(recipe, ["model.sound.hop=250", f"output={tmp_path}/other"])
