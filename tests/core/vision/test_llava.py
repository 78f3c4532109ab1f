"""Decoders that see in LLaVA's folders, against transformers with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.vision_language import load_vision_language, vision_language_config
from penjing.core.errors import InputError
from penjing.core.family import family_of
from penjing.core.imports.importer import import_model
from tests.serve.seeing import ROWS, SIDE, TOKEN_ID, write_llava

TOWERS = ["clip_vision_model", "siglip_vision_model"]


def texts_with_images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 250, (2, 9), generator=generator)
    tokens[0, 1 : 1 + ROWS] = TOKEN_ID
    tokens[1, 3 : 3 + ROWS] = TOKEN_ID
    return tokens, torch.randn(2, 3, SIDE, SIDE, generator=generator)


@pytest.mark.parametrize("tower", TOWERS)
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, tower: str) -> None:
    theirs = write_llava(tmp_path, tower)
    assert family_of(tmp_path) == "vision_language"
    ours = load_vision_language(tmp_path)
    tokens, images = texts_with_images()
    wanted, found = theirs(input_ids=tokens, pixel_values=images).logits, ours(tokens, images)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).mean().backward()
    (wanted * weights).mean().backward()
    vision, named = theirs.model.vision_tower, dict(ours.named_parameters())
    pairs = {
        "vision.embeddings.patch_embedding.weight": vision.embeddings.patch_embedding.weight,
        "vision.embeddings.position_embedding.weight": vision.embeddings.position_embedding.weight,
        "vision.encoder.layers.1.mlp.fc1.bias": vision.encoder.layers[1].mlp.fc1.bias,
        "projector.linear_1.weight": theirs.model.multi_modal_projector.linear_1.weight,
        "projector.linear_2.bias": theirs.model.multi_modal_projector.linear_2.bias,
        "decoder.model.embed_tokens.weight": theirs.model.language_model.embed_tokens.weight,
    }
    for name, parameter in pairs.items():
        gradient = named[name].grad
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("tower", TOWERS)
def test_transformers_reads_what_is_imported(tmp_path: Path, tower: str) -> None:
    from transformers import LlavaForConditionalGeneration

    theirs = write_llava(tmp_path / "theirs", tower)
    import_model(str(tmp_path / "theirs"), tmp_path / "ours")
    read: Any = LlavaForConditionalGeneration.from_pretrained
    again, loading = read(tmp_path / "ours", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert vision_language_config(tmp_path / "ours") == vision_language_config(tmp_path / "theirs")
    tokens, images = texts_with_images()
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images).logits
        torch.testing.assert_close(again.eval()(input_ids=tokens, pixel_values=images).logits, wanted)
        torch.testing.assert_close(
            load_vision_language(tmp_path / "ours")(tokens, images), wanted, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    "names",
    [
        {"vision_tower.": "vision_tower.vision_model."},
        {
            "vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector.",
            "language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.",
        },
    ],
)  # fmt: skip
def test_other_names_of_the_same_tensors_are_known(tmp_path: Path, names: dict[str, str]) -> None:
    write_llava(tmp_path)
    wanted = load_vision_language(tmp_path)
    stored = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        part = next((part for part in names if name.startswith(part)), "")
        stored[names.get(part, "") + name.removeprefix(part)] = tensor
    stored[f"{names['vision_tower.']}embeddings.position_ids"] = torch.arange(5)[None]
    save_file(stored, tmp_path / "model.safetensors")
    found, opened = load_vision_language(tmp_path), open_checkpoint(tmp_path)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter)
        if name.startswith("decoder."):
            assert torch.equal(opened.get(name.removeprefix("decoder.")), parameter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vision_feature_layer": [-2, -1]}, r"vision_feature_layer=\[-2, -1\] is not supported"),
        ({"vision_feature_layer": -4}, "vision_feature_layer=-4 is none of the 3 layers"),
        ({"vision_feature_layer": 0}, "vision_feature_layer=0 is none of the 3 layers"),
        ({"vision_feature_select_strategy": "full"}, "it must be 'default'"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act='relu' is not supported"),
        ({"projector_hidden_act": ["gelu"]}, r"projector_hidden_act=\['gelu'\] is not supported"),
        ({"vision_config.hidden_act": {}}, r"hidden_act=\{\} is not supported"),
        ({"vision_config.model_type": [[]]}, r"the vision tower \[\[\]\] is not supported"),
        ({"vision_config.model_type": "pixtral"}, "the vision tower 'pixtral' is not supported"),
        ({"vision_config.hidden_size": 32}, "has shape .* is needed; get the model again"),
        ({"vision_config.num_hidden_layers": 2}, "layers.2.* has no place in the model"),
        ({"text_config": None}, "needs the objects text_config and vision_config"),
        ({"image_token_index": 264}, "image_token_id=264 is none of the decoder's 264 tokens"),
        ({"multimodal_projector_bias": False}, "projector.linear_1.bias has no place"),
    ],
)
def test_a_folder_that_is_wrong_is_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    write_llava(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for name, value in change.items():
        inside, _, key = name.rpartition(".")
        (values[inside] if inside else values)[key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=said) as caught:
        load_vision_language(tmp_path)
    assert "\n" not in str(caught.value)


def test_how_images_enter_must_be_told(tmp_path: Path) -> None:
    write_llava(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_pad": True}))
    with pytest.raises(InputError, match="do_pad=True is not supported"):
        load_vision_language(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match=r"has no preprocessor_config\.json"):
        load_vision_language(tmp_path)
