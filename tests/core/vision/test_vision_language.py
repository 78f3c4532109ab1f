"""A decoder that sees, against transformers' Idefics3 with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.vision_language import load_vision_language, save_vision_language, vision_language_config
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.core.images.tiles import Look
from penjing.core.vision.vision_language import pixel_shuffle

IMAGE = 59


def write_idefics3(folder: Path, *, tied: bool = False) -> Any:
    """A small Idefics3 of transformers with random weights."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "model_type": "llama", "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 16, "patch_size": 4, "initializer_range": 0.2,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2, tie_word_embeddings=tied
    )
    model = Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def texts_with_images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 50, (2, 14), generator=generator)
    tokens[0, 1:5] = IMAGE
    tokens[0, 7:11] = IMAGE
    tokens[1, 2:6] = IMAGE
    tokens[1, 9:13] = IMAGE
    return tokens, torch.randn(4, 3, 16, 16, generator=generator)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, tied: bool) -> None:
    theirs = write_idefics3(tmp_path, tied=tied)
    assert family_of(tmp_path) == "vision_language"
    ours = load_vision_language(tmp_path)
    tokens, images = texts_with_images()
    wanted = theirs(input_ids=tokens, pixel_values=images.view(2, 2, 3, 16, 16)).logits
    found = ours(tokens, images)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).mean().backward()
    (wanted * weights).mean().backward()
    pairs = {
        "vision.embeddings.patch_embedding.weight": theirs.model.vision_model.embeddings.patch_embedding.weight,
        "vision.encoder.layers.1.mlp.fc1.bias": theirs.model.vision_model.encoder.layers[1].mlp.fc1.bias,
        "projector.weight": theirs.model.connector.modality_projection.proj.weight,
        "decoder.model.embed_tokens.weight": theirs.model.text_model.embed_tokens.weight,
    }
    named = dict(ours.named_parameters())
    for name, parameter in pairs.items():
        gradient = named[name].grad
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    from transformers import Idefics3ForConditionalGeneration

    write_idefics3(tmp_path / "theirs")
    ours = load_vision_language(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    save_vision_language(tmp_path / "ours", ours.config, ours, tmp_path / "theirs", {})
    again = Idefics3ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    assert vision_language_config(tmp_path / "ours") == ours.config
    tokens, images = texts_with_images()
    with torch.no_grad():
        wanted = again(input_ids=tokens, pixel_values=images.view(2, 2, 3, 16, 16)).logits
        torch.testing.assert_close(
            load_vision_language(tmp_path / "ours")(tokens, images), wanted, atol=1e-5, rtol=1e-5
        )


def test_pixel_shuffle_joins_neighbours() -> None:
    x = torch.arange(16.0).view(1, 16, 1)
    assert pixel_shuffle(x, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale_factor": 3}, "4 patches of a side cannot be joined 3 at a time"),
        ({"image_token_id": 60}, "image_token_id=60 is none of the decoder's 60 tokens"),
        ({"vision_config": None}, "needs the objects text_config and vision_config"),
        ({"model_type": "llama"}, "is no decoder that sees"),
        ({"vision_config.hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"vision_config.patch_size": 5}, "image_size=16 is not divisible by patch_size=5"),
        ({"vision_config.hidden_size": 32}, "has shape .* is needed; get the model again"),
        ({"vision_config.num_hidden_layers": 3}, "layers.2.* is missing of the model"),
        ({"vision_config.num_hidden_layers": 1}, "layers.1.* has no place in the model"),
    ],
)
def test_a_folder_that_is_wrong_is_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_idefics3(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for name, value in change.items():
        inside, _, key = name.rpartition(".")
        (values[inside] if inside else values)[key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=said) as caught:
        load_vision_language(tmp_path)
    assert "\n" not in str(caught.value)


def test_smolvlm_is_the_same_network_by_another_name(tmp_path: Path) -> None:
    write_idefics3(tmp_path)
    wanted = load_vision_language(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"model_type": "smolvlm"}
    path.write_text(json.dumps(values))
    assert family_of(tmp_path) == "vision_language"
    assert open_checkpoint(tmp_path).config == wanted.config.decoder
    tokens, images = texts_with_images()
    torch.testing.assert_close(load_vision_language(tmp_path)(tokens, images), wanted(tokens, images))


def test_how_images_are_shown_is_kept(tmp_path: Path) -> None:
    write_idefics3(tmp_path / "theirs")
    path = tmp_path / "theirs/preprocessor_config.json"
    assert vision_language_config(tmp_path / "theirs").look == Look()
    said = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}, "image_mean": [0.5] * 3}
    path.write_text(json.dumps(said))
    ours = load_vision_language(tmp_path / "theirs")
    assert ours.config.look == Look(filter="lanczos", tiles=64)
    for place, look in enumerate((ours.config.look, Look(), Look(filter="bicubic"))):
        config = ours.config.model_copy(update={"look": look})
        (tmp_path / f"{place}").mkdir()
        save_vision_language(tmp_path / f"{place}", config, ours, tmp_path / "theirs", {})
        assert vision_language_config(tmp_path / f"{place}") == config


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"do_image_splitting": True}, "scaled to None; the network's have 16"),
        ({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 8}}, "squares of 8 pixels"),
        ({"size": {"longest_edge": "64"}, "max_image_size": {"longest_edge": 16}}, "scaled to None"),
        ({"size": {"longest_edge": 1600}, "max_image_size": {"longest_edge": 16}}, "more than 8 squares"),
        ({"size": 3, "max_image_size": None}, "squares of None pixels"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean="),
        ({"image_std": "half"}, "image_std="),
        ({"resample": 0}, "resample=0 is not supported"),
        ({"resample": []}, "resample=.* is not supported"),
    ],
)
def test_images_that_are_shown_otherwise_are_refused(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    write_idefics3(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=why) as caught:
        load_vision_language(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_one_line(tmp_path: Path) -> None:
    write_idefics3(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="is not a complete safetensors file"):
        load_vision_language(tmp_path)
