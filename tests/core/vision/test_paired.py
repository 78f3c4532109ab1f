"""CLIP and SigLIP, against transformers' models with random weights."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

from penjing.core.checkpoint.towers import load_towers, save_towers
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.core.images.decode import arranged, decode_image, network_input
from penjing.core.imports.importer import import_model
from penjing.core.text.text_tokenizer import TextTokenizer
from penjing.train.objective.contrastive import contrastive_sum
from tests.core.vision.paired import LONGEST, PAD, SIDE, Kind, write_paired

TEXTS = ["a cat", "the drawing of a dog that is long", "x", ""]
KINDS = get_args(Kind)


def theirs(model: Any, kind: Kind, images: torch.Tensor, rows: list[list[int]]) -> Any:
    """What transformers gives for the tokens of texts, filled up as its processor does."""
    filled = torch.tensor([row + [PAD] * (LONGEST - len(row)) for row in rows])
    return model(input_ids=filled, pixel_values=images, return_loss=len(images) == len(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_loss_and_gradients_are_those_of_transformers(tmp_path: Path, kind: Kind) -> None:
    model = write_paired(tmp_path / "theirs", kind)
    import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    assert family_of(tmp_path / "ours") == "towers"
    ours = load_towers(tmp_path / "ours")
    tokenizer = TextTokenizer(tmp_path / "ours", ours.config.text)
    images = torch.randn(len(TEXTS), 3, SIDE, SIDE)
    wanted = theirs(model, kind, images, tokenizer.rows(TEXTS))
    found = ours(images, *tokenizer(TEXTS).tensors())
    torch.testing.assert_close(found.images, wanted.image_embeds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.texts, wanted.text_embeds, atol=1e-5, rtol=1e-5)
    everything = torch.arange(len(TEXTS)), torch.ones(len(TEXTS), dtype=torch.bool)
    loss = contrastive_sum(kind, found, *everything) / len(TEXTS)
    torch.testing.assert_close(loss, wanted.loss, atol=1e-5, rtol=1e-5)
    loss.backward()
    wanted.loss.backward()
    pairs = {
        "image.encoder.layers.0.mlp.fc1.weight": model.vision_model.encoder.layers[0].mlp.fc1.weight,
        "image.embeddings.patch_embedding.weight": model.vision_model.embeddings.patch_embedding.weight,
        "text.embeddings.token_embedding.weight": model.text_model.embeddings.token_embedding.weight,
        "logit_scale": model.logit_scale,
    }
    named = dict(ours.named_parameters())
    for name, parameter in pairs.items():
        gradient = named[name].grad
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad.reshape(gradient.shape), atol=1e-5, rtol=1e-4, msg=name)


def test_a_text_ends_where_configs_before_2023_mean(tmp_path: Path) -> None:
    model = write_paired(tmp_path / "theirs", "clip", end=2)
    import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    ours = load_towers(tmp_path / "ours")
    tokenizer = TextTokenizer(tmp_path / "ours", ours.config.text)
    images = torch.zeros(1, 3, SIDE, SIDE)
    wanted = theirs(model, "clip", images, tokenizer.rows(TEXTS)).text_embeds
    found = ours(images, *tokenizer(TEXTS).tensors()).texts
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_is_saved(tmp_path: Path, kind: Kind) -> None:
    from transformers import AutoImageProcessor, AutoModel

    model = write_paired(tmp_path / "theirs", kind)
    ours = load_towers(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_towers(tmp_path / "ours", ours, ours.config, tmp_path / "theirs", LONGEST, {})
    assert towers_config(tmp_path / "ours") == ours.config
    again = AutoModel.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, atol=0, rtol=0)
    values = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    wanted = AutoImageProcessor.from_pretrained(tmp_path / "ours", backend="pil")(
        Image.fromarray(values), return_tensors="pt"
    )
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    pixels = ours.config.pixels
    found = network_input(arranged(decode_image(file.getvalue(), pixels), pixels), pixels)
    np.testing.assert_allclose(found, wanted["pixel_values"][0].numpy(), atol=1e-5)


def test_patches_that_do_not_fill_an_image(tmp_path: Path) -> None:
    model = write_paired(tmp_path, "siglip", side=18)  # as siglip-so400m-patch14-384 has it
    images = torch.randn(2, 3, 18, 18)
    with torch.no_grad():
        found = load_towers(tmp_path)(images, torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 3))
        wanted = theirs(model, "siglip", images, [[1, 1, 1]])
    torch.testing.assert_close(found.images, wanted.image_embeds, atol=1e-5, rtol=1e-5)


def change(folder: Path, file: str, **changes: Any) -> None:
    values = json.loads((folder / file).read_text())
    for name, value in changes.items():
        inside, _, key = name.rpartition("__")
        (values[inside] if inside else values)[key] = value
    (folder / file).write_text(json.dumps(values))


CONFIG, PIXELS = "config.json", "preprocessor_config.json"


@pytest.mark.parametrize(
    ("kind", "file", "changes", "said"),
    [
        ("clip", CONFIG, {"projection_dim": 21}, "projection.weight has shape .*20, .*21, .* is needed"),
        ("clip", CONFIG, {"text_config__hidden_size": 26}, "has shape .* is needed; get the model again"),
        ("clip", CONFIG, {"text_config__hidden_size": 25}, "hidden_size=25 is not divisible by num_attention_heads=2"),
        ("clip", CONFIG, {"text_config__vocab_size": 10**12}, "has shape .* is needed"),
        ("clip", CONFIG, {"vision_config__hidden_act": "relu"}, "activation"),
        ("clip", CONFIG, {"vision_config__num_hidden_layers": 3}, "layers.2.* is missing of the model"),
        ("clip", CONFIG, {"text_config__num_hidden_layers": 1}, "layers.1.* has no place in the model"),
        ("clip", CONFIG, {"text_config__eos_token_id": 5}, "ends no text with the token 5"),
        ("clip", CONFIG, {"text_config__eos_token_id": 32}, "end_token_id=32 is none of the vocabulary's 32 tokens"),
        ("clip", CONFIG, {"text_config": 3}, "text_config must be an object"),
        ("siglip", CONFIG, {"text_config__projection_size": 30}, "hidden_size=32 numbers and texts of 30"),
        ("siglip", CONFIG, {"vision_config__vision_use_head": False}, "leaves no vector of an image"),
        ("siglip", PIXELS, {"size": {"height": 9, "width": 9}}, "files do not belong together"),
        ("clip", PIXELS, {"crop_size": 9}, "files do not belong together"),
        ("clip", PIXELS, {"size": {"shortest_edge": 9}}, "it must be at least as large"),
        ("clip", PIXELS, {"resample": 0}, "resample=0 is not supported"),
        ("clip", PIXELS, {"rescale_factor": 1}, "rescale_factor=1 is not supported"),
        ("clip", PIXELS, {"rescale_factor": "x"}, "rescale_factor='x' is not supported"),
        ("clip", PIXELS, {"image_mean": None}, "mean"),
        ("clip", PIXELS, {"image_std": [0, 1, 1]}, "each std must be above 0"),
    ],
)
def test_a_folder_that_is_wrong_is_one_line(
    tmp_path: Path, kind: Kind, file: str, changes: dict[str, Any], said: str
) -> None:
    write_paired(tmp_path / "in", kind)
    change(tmp_path / "in", file, **changes)
    with pytest.raises(InputError, match=said) as caught:
        import_model(str(tmp_path / "in"), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"

    def refused(said: str) -> None:
        with pytest.raises(InputError, match=said):
            import_model(str(folder), tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]

    write_paired(folder, "clip")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    refused("is not a complete safetensors file")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused("pytorch_model.bin, a pickle, which can run code and is not read")
    (folder / "pytorch_model.bin").unlink()
    refused("holds no model.safetensors")
    (folder / "tokenizer.json").unlink()
    refused("has no tokenizer.json")
    (folder / "preprocessor_config.json").unlink()
    refused("has no preprocessor_config.json")
