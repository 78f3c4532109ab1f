"""Configuration of two towers' folders, without torch: penjing's own `config.json`, or Hugging Face's of CLIP and
SigLIP (`model_type` clip or siglip) with `preprocessor_config.json` beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text
from penjing.core.images.processor import PREPROCESSOR, read_pixels, written_pixels
from penjing.core.manifest import read_json_object
from penjing.core.vision.paired_config import ImageTransformerConfig, TextTransformerConfig
from penjing.core.vision.towers_config import TowersConfig

_ALIKE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps")
# What Hugging Face's classes take where config.json leaves a field out.
_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "clip": {
        "text_config": {
            "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
            "num_attention_heads": 8, "max_position_embeddings": 77, "layer_norm_eps": 1e-5,
            "hidden_act": "quick_gelu", "eos_token_id": 49407,
        },
        "vision_config": {
            "image_size": 224, "patch_size": 32, "num_channels": 3, "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu",
        },
    },
    "siglip": {
        "text_config": {
            "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "max_position_embeddings": 64, "layer_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh", "pad_token_id": 1,
        },
        "vision_config": {
            "image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12, "layer_norm_eps": 1e-6,
            "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True,
        },
    },
}  # fmt: skip
_OLD_END = 2  # configs before transformers' pull request 24773 say so, and mean the largest token of a text


def towers_config(folder: Path) -> TowersConfig:
    """The content of the towers' `config.json`, and of `preprocessor_config.json` where images are told of there.

    Raises:
        InputError: missing, damaged, of another kind, or of a computation that `TwoTowers` does not do.
    """
    path = folder / "config.json"
    values = read_json_object(path)
    if values.get("model_type") in _DEFAULTS:
        return _paired_config(folder, values)
    try:
        return parse_config(TowersConfig, values, str(path))
    except ConfigError as error:
        raise InputError(f"{folder} cannot be loaded: {error}; make it again") from error


def save_towers_config(folder: Path, config: TowersConfig) -> None:
    """Write what `towers_config` reads; where the towers are CLIP's or SigLIP's, transformers reads it too."""
    if config.is_paired:
        _save_paired_config(folder, config)
    else:
        atomic_write_text(folder / "config.json", json.dumps(config.model_dump(), indent=2) + "\n")


def _save_paired_config(folder: Path, config: TowersConfig) -> None:
    image, text, kind = config.image, config.text, config.loss
    assert isinstance(image, ImageTransformerConfig)
    assert isinstance(text, TextTransformerConfig)
    vision: dict[str, Any] = {"model_type": f"{kind}_vision_model", "hidden_act": image.activation}
    vision |= image.model_dump(exclude={"activation", "pooling", "dimension"})
    words: dict[str, Any] = {"model_type": f"{kind}_text_model", "hidden_act": text.activation}
    words |= text.model_dump(exclude={"activation", "pooling", "end_token_id", "pad_token_id"})
    if kind == "clip":
        words["eos_token_id"] = _OLD_END if text.end_token_id is None else text.end_token_id
        values: dict[str, Any] = {"architectures": ["CLIPModel"], "projection_dim": config.dimension}
        vision["projection_dim"] = words["projection_dim"] = config.dimension
    else:
        words |= {"pad_token_id": text.pad_token_id, "projection_size": config.dimension}
        values = {"architectures": ["SiglipModel"]}
        vision["vision_use_head"] = True
    values |= {"model_type": kind, "text_config": words, "vision_config": vision}
    seen = {
        **written_pixels(config.pixels),
        "image_processor_type": "CLIPImageProcessor" if kind == "clip" else "SiglipImageProcessor",
    }
    for name, content in (("config.json", values), (PREPROCESSOR, seen)):
        atomic_write_text(folder / name, json.dumps(content, indent=2) + "\n")


def _paired_config(folder: Path, values: dict[str, Any]) -> TowersConfig:
    path = folder / "config.json"
    kind = str(values["model_type"])
    text, vision = (_part(values, f"{name}_config", kind, path) for name in ("text", "vision"))
    if vision.get("vision_use_head") is False:
        raise InputError(f"{path}: vision_use_head=false leaves no vector of an image; only towers with one are read")
    clip = kind == "clip"
    end = text.get("eos_token_id")
    if clip and type(end) is not int:
        raise InputError(f"{path}: text_config.eos_token_id={end!r} must be one token")
    dimension = values.get("projection_dim", 512) if clip else text.get("projection_size") or text["hidden_size"]
    chosen = {
        "image": {name: vision[name] for name in (*_ALIKE, "image_size", "patch_size", "num_channels")}
        | {"activation": vision["hidden_act"], "pooling": "class" if clip else "attention", "dimension": dimension},
        "text": {name: text[name] for name in (*_ALIKE, "vocab_size", "max_position_embeddings")}
        | {"activation": text["hidden_act"]}
        | (
            {"pooling": "end", "end_token_id": None if end == _OLD_END else end}
            if clip
            else {"pooling": "last", "pad_token_id": text["pad_token_id"]}
        ),
    }
    try:
        image = parse_config(ImageTransformerConfig, chosen["image"], f"{path}: vision_config")
        texts = parse_config(TextTransformerConfig, chosen["text"], f"{path}: text_config")
        seen = read_pixels(folder, image.image_size, image.num_channels)
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged, or of another kind of model") from None
    return TowersConfig(
        image=image, image_size=(seen.height, seen.width), mean=seen.mean, std=seen.std, fit=seen.fit,
        resize=seen.resize, filter=seen.filter, text=texts, loss="clip" if clip else "siglip",
    )  # fmt: skip


def _part(values: dict[str, Any], name: str, kind: str, path: Path) -> dict[str, Any]:
    """The object `name` with what is left out; `NAME_dict` of old files stands in its place."""
    given = values.get(f"{name}_dict")
    given = values.get(name) if given is None else given
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise InputError(f"{path}: {name} must be an object; get the model again")
    return _DEFAULTS[kind][name] | given
